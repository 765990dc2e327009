"""A small transformer for PyTorch and JAX, of `exact_order` layers and operations whose order both have.

Products of weights are blockfp's layers, and the optimizers are blockfp's. All else is elementwise multiplication, addition,
one square root and one division, each rounded by IEEE 754. Sums over an axis add halves (`_added`), and axes are repeated by
doubling (`_repeated`), so that the sums in their derivatives have one order too. So a CPU and a Hopper GPU have the same bits.

Kept out: softmax (the attention's weights are squared ReLUs, for no two libraries have one exp), the derivative of a norm's
factor, and the loss, of which only y's gradient is made.
"""

import numpy as np

WIDTH, TOKENS, HEADS, BLOCKS = 128, 16, 4, 2
LAYERS = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH)}


def weights(blocks=BLOCKS):
    """The first weights, by name."""
    rng = np.random.default_rng(0)
    shapes = {f"{name}{i}": shape for i in range(blocks) for name, shape in LAYERS.items()}
    return {name: (rng.standard_normal(shape) / 16).astype(np.float32) for name, shape in shapes.items()}


def batch(step):
    """x and the wanted y [tokens, width]."""
    rng = np.random.default_rng(1000 + step)
    return [rng.standard_normal((TOKENS, WIDTH)).astype(np.float32) for _ in range(2)]


def _added(x, axis):
    while x.shape[axis] > 1:
        half = [slice(None)] * x.ndim
        other = list(half)
        half[axis], other[axis] = slice(None, x.shape[axis] // 2), slice(x.shape[axis] // 2, None)
        x = x[tuple(half)] + x[tuple(other)]
    return x


def _repeated(cat, x, axis, times):
    while times > 1:
        x, times = cat([x, x], axis), times // 2
    return x


def forward(library, linear, x, blocks=BLOCKS):
    """y of x, both [tokens, width]; `library` has cat, where and factor, `linear` multiplies by a named weight."""
    cat = library.cat

    def norm(x):
        # One use of x outside, for sums of more than two gradients have an order.
        x = x * 1.0
        mean = _added(x * x, 1) * (1.0 / WIDTH)
        return x * _repeated(cat, library.factor(mean + 1e-6), 1, WIDTH)

    def squared_relu(x):
        x = library.where(x > 0, x, x * 0.0)
        return x * x

    def heads(x):
        return x.reshape(TOKENS, HEADS, WIDTH // HEADS)

    def attention(q, k, v):
        q = _repeated(cat, heads(q)[:, None], 1, TOKENS)
        k, v = (_repeated(cat, heads(x)[None], 0, TOKENS) for x in (k, v))
        share = squared_relu(_added(q * k, 3)) * (1.0 / TOKENS / WIDTH)
        return _added(_repeated(cat, share, 3, WIDTH // HEADS) * v, 1).reshape(TOKENS, WIDTH)

    for i in range(blocks):
        qkv = linear(norm(x), f"qkv{i}")
        x = x + linear(attention(qkv[:, :WIDTH], qkv[:, WIDTH : 2 * WIDTH], qkv[:, 2 * WIDTH :]), f"out{i}")
        x = x + linear(squared_relu(linear(norm(x), f"up{i}")), f"down{i}")
    return x


def in_torch(recipe, steps, blocks=BLOCKS, device="cpu"):
    """Yields y, the weights' gradients, and their codes, scales and masters, after each step."""
    import torch

    import blockfp.torch as bfp

    class Library:
        cat, where = staticmethod(torch.cat), staticmethod(torch.where)

        @staticmethod
        def factor(x):
            # torch rounds one in six float32 roots otherwise than IEEE 754, and on a GPU numbers divided by a tensor.
            root = x.detach().double().sqrt().float()
            return torch.ones_like(root) / root

    layers = {}
    for name, w in weights(blocks).items():
        layers[name] = bfp.Linear(w.shape[1], w.shape[0], bias=False, recipe=recipe, dtype=torch.float32, device=device)
        layers[name].load_state_dict({"weight": torch.from_numpy(w)}, strict=False)
    optimizer = bfp.AdamW([layer.weight for layer in layers.values()], lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        x, wanted = (torch.from_numpy(each).to(device) for each in batch(step))
        y = forward(Library, lambda x, name: layers[name](x), x, blocks)
        y.backward((y.detach() - wanted) * (2.0 / TOKENS / WIDTH))
        gradients = {name: layer.weight.grad.numpy(force=True).copy() for name, layer in layers.items()}
        optimizer.step()
        optimizer.zero_grad()
        of = {name: (w := layer.weight, optimizer.state[w]["master"]) for name, layer in layers.items()}
        parts = {name: [x.numpy(force=True).copy() for x in (w.codes, w.scales, master)] for name, (w, master) in of.items()}
        yield y.numpy(force=True), gradients, parts


def in_jax(recipe, steps, blocks=BLOCKS):
    """As `in_torch`. Nothing but layers and optimizer is compiled: XLA rounds fused operations otherwise."""
    import jax
    import jax.numpy as jnp

    import blockfp.jax as bfp

    class Library:
        where, cat = staticmethod(jnp.where), staticmethod(jnp.concatenate)

        @staticmethod
        @jax.custom_jvp
        def factor(x):
            # Not by XLA, whose GPU divides otherwise than IEEE 754.
            return jnp.asarray(np.float32(1) / np.sqrt(np.asarray(x)))

    Library.factor.defjvp(lambda x, d: (Library.factor(*x), jnp.zeros_like(x[0])))

    first = {name: jnp.asarray(w) for name, w in weights(blocks).items()}
    params = bfp.quantize_params(first, recipe)
    optimizer = bfp.adamw(1e-3, weight_decay=0.01)
    state = optimizer.init(params, first)
    update = jax.jit(lambda gradients, state, params: optimizer.update(gradients, state, params))

    def loss(params, x, wanted):
        y = forward(Library, lambda x, name: bfp.linear(x, params[name], recipe=recipe), x, blocks)
        gradient = jax.lax.stop_gradient((y - wanted) * (2.0 / TOKENS / WIDTH))
        return (y * gradient).sum(), y

    for step in range(steps):
        gradients, y = bfp.grad(loss, has_aux=True)(params, *map(jnp.asarray, batch(step)))
        updates, state = update(gradients, state, params)
        params = bfp.apply_updates(params, updates)
        parts = {name: [np.asarray(x) for x in (w.codes, w.scales, state.masters[name])] for name, w in params.items()}
        yield np.asarray(y), {name: np.asarray(g) for name, g in gradients.items()}, parts


def first_difference(recipe, steps, blocks=BLOCKS, *others):
    """Returns where other runs first differ from PyTorch's on a CPU, "" where they never do, and the steps that were taken.

    `others` are iterators such as `in_jax(recipe, steps, blocks)` makes, by default that one.
    """
    others = others or (in_jax(recipe, steps, blocks),)
    for step, runs in enumerate(zip(in_torch(recipe, steps, blocks), *others, strict=True)):
        for other in runs[1:]:
            if found := _difference(runs[0], other):
                return f"step {step}: {found}", step
    return "", steps


def _difference(one, other):
    """Returns what differs after a step, "" if nothing does."""
    (y, gradients, parts), (other_y, other_gradients, other_parts) = one, other
    if count := _differing(y, other_y):
        return f"y, {count} elements"
    for name in gradients:
        if count := _differing(gradients[name], other_gradients[name]):
            return f"the gradient of {name}, {count} elements"
    for name in parts:
        for part, other, what in zip(parts[name], other_parts[name], ("codes", "scales", "masters"), strict=True):
            if count := _differing(part, other):
                return f"{what} of {name} after the update, {count} elements"
    return ""


def _differing(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    bits = np.uint8 if a.dtype == np.uint8 else np.int32
    return int((a.view(bits) != b.view(bits)).sum())
