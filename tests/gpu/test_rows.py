"""A scale for each row on a GPU, beyond casts and products; and weights on their way to a server."""

import warnings

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    import blockfp.torch as bfp


def values(shape, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)


def layer(device):
    made = bfp.Linear(256, 384, recipe="fp8_row", dtype=torch.bfloat16)
    bfp.load_high_precision_(made.weight, values((384, 256), 1))
    with torch.no_grad():
        made.bias.copy_(values((384,), 2))
    return made.to(device)


def test_a_layer_is_that_of_a_cpu():
    results = []
    for device in ("cpu", "cuda"):
        one, x = layer(device), values((130, 256), 3, device).requires_grad_()
        y = one(x)
        y.backward(values((130, 384), 4, device))
        results.append([part.cpu().float() for part in (y.detach(), x.grad, one.weight.grad, one.bias.grad)])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7 * float(wanted.abs().max()))


def test_the_optimizer_writes_the_codes_of_the_master():
    one = layer("cuda")
    optimizer = bfp.AdamW(one.parameters(), lr=1e-2)
    for seed in range(3):
        one(values((64, 256), seed, "cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    master = optimizer.state[one.weight]["master"]
    wanted = bfp.quantize(master.cpu(), "fp8_e4m3_row_pow2")
    assert torch.equal(one.weight.codes.cpu(), wanted.codes)
    assert torch.equal(one.weight.scales.cpu(), wanted.scales)


def test_groups_are_multiplied_one_after_another_and_that_is_said():
    results, counts = [], [40, 0, 90]
    for device in ("cpu", "cuda"):
        one = bfp.GroupedLinear(3, 256, 128, recipe="fp8_row", dtype=torch.bfloat16, bias=False)
        bfp.load_high_precision_(one.weight, values((3, 128, 256), 5))
        one, x = one.to(device), values((130, 256), 6, device).requires_grad_()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            y = one(x, torch.tensor(counts, device=device))
        y.backward(values((130, 128), 7, device))
        results.append([part.cpu().float() for part in (y.detach(), x.grad, one.weight.grad)])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("format", "layout"),
    [
        ("fp8_e4m3_row", "compressed-tensors"),
        ("mxfp8_e4m3_32x32", "compressed-tensors"),
        ("nvfp4_16x16", "modelopt"),
        ("fp8_e4m3_128x128", "fine-grained-fp8"),
    ],
)
def test_what_a_server_gets_is_what_a_cpu_would_send(format, layout):
    model = torch.nn.Sequential(bfp.Linear(256, 384, recipe=bfp.recipes.mxfp8().replace(weight=bfp.recipes.Cast(format))))
    digests = []
    for device in ("cpu", "cuda"):
        found = {}
        for bucket in bfp.stream_weights(model.to(device), layout=layout):
            found |= bucket.sha256
            assert all(tensor.device.type == device for _, tensor in bucket)
        digests.append(found)
    assert digests[0] == digests[1] != {}
