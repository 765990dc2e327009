"""Steps of training, as any loop does them."""


def train(optimizer, loss_of, batches):
    """Takes a step on `loss_of` each batch; returns the losses."""
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
