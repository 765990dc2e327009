"""PEFT's LoRA over quantized weights under FSDP2, on real gloo: what is sent, what stays, what is learned."""

import copy
import hashlib
import math
import warnings

import gloo
import pytest
import torch
import torch.distributed as dist
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from documented import run_documented
from peft import LoraConfig, PeftModel, get_peft_model
from peft_models import EXPERTS, LATENT, SIZES
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.integrations.peft import merged, register

STEPS = 20
DEEPSEEK = LATENT | {
    "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 96, "first_k_dense_replace": 1,
}  # fmt: skip
# As NVFP4 models are released: blocks of 16 along a row.
NVFP4 = recipes.nvfp4().replace(weight=recipes.Cast(bfp.Format.parse("nvfp4")))
MODELS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), NVFP4, ["q_proj", "v_proj", "down_proj"], None),
    "gpt-oss": (
        lambda: GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)),
        "mxfp4",
        ["q_proj"],
        EXPERTS,
    ),
    # Five experts and two ranks: not of equal length.
    "deepseek": (
        lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **DEEPSEEK)),
        "fp8_block",
        ["q_proj", "o_proj"],
        EXPERTS,
    ),
}


def tokens(rank):
    return torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(rank))


def adapted(name, *, quantized=True, compute="quantized", **options):
    make, recipe, modules, parameters = MODELS[name]
    torch.manual_seed(0)
    model = make()
    if quantized:
        bfp.convert(model, recipe, filter_fn=lambda path, layer: path != "lm_head", keep_init=False, compute=compute)
    for module in model.modules():
        if getattr(module, "rng_key", None) is not None:
            module.rng_key.fill_(7)
    torch.manual_seed(1)
    config = LoraConfig(target_modules=modules, target_parameters=parameters, r=4, lora_alpha=8, **options)
    model = get_peft_model(model, register(config))
    for key, param in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(param, std=0.05)
    return model


def shard(model):
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows sums only
    return model


def digests(model):
    """SHA-256 of each frozen weight's codes and scales, those that this rank holds."""
    found = {}
    for name, param in model.named_parameters():
        local = local_of(param)
        if isinstance(local, bfp.QuantizedTensor):
            bits = b"".join(part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in local.parts)
            found[name] = hashlib.sha256(bits).hexdigest()
    assert len(found) > 10
    return found


def train(model, rank, steps=STEPS):
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(rank), labels=tokens(rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    return losses


def full(state):
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def adapters(model):
    return full({name: param.detach() for name, param in model.named_parameters() if "lora_" in name})


class Counted:
    """FSDP2's own all-gather, by its public hook, which counts what it sends."""

    def __init__(self):
        self.bytes = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.bytes += output_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def parts(model):
    """Bytes of all codes and scales, and of adapters and the rest, which travel as they are."""
    coded = plain = 0
    for layer in model.base_model.model.model.layers:
        for param in layer.parameters():
            held = param.parts if isinstance(param, bfp.QuantizedTensor) else [param]
            size = sum(part.numel() * part.element_size() for part in held)
            coded, plain = (coded + size, plain) if len(held) > 1 else (coded, plain + size)
    return coded, plain


def as_one_process(rank, name):
    """Two ranks learn what one does that has both batches; nothing of the base moves, and codes are what travels."""
    warnings.simplefilter("ignore")
    whole = adapted(name, compute="high_precision")
    coded, plain = parts(whole)
    optimizer = torch.optim.AdamW([param for param in whole.parameters() if param.requires_grad], lr=1e-2, foreach=False)
    expected = []
    for _ in range(4):
        losses = [whole(input_ids=tokens(each), labels=tokens(each)).loss for each in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(losses).item() / 2)
    model = shard(adapted(name, compute="high_precision"))
    before = digests(model)
    sent = Counted()
    for layer in model.base_model.model.model.layers:
        layer.set_custom_all_gather(sent)
    with torch.no_grad():
        model(input_ids=tokens(rank))
    # Ranks send alike: a shorter shard is padded, and a part of a block has the block's scale.
    assert coded + plain <= sent.bytes < 1.35 * (coded + plain), (sent.bytes, coded, plain)
    assert train(model, rank, 4) == pytest.approx(expected, rel=1e-4)
    assert digests(model) == before
    ours, theirs = adapters(model), adapters(whole)
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert (ours[key] - theirs[key]).norm() < 0.05 * theirs[key].norm(), key


def twenty_steps(rank, name):
    """The loss falls as over a base in high precision, with quantized products; every base code stays."""
    warnings.simplefilter("ignore")
    model = shard(adapted(name))
    before, start = digests(model), adapters(model)
    losses = train(model, rank)
    assert digests(model) == before
    moved = adapters(model)
    assert not any(torch.equal(moved[key], start[key]) for key in moved)
    high = train(shard(adapted(name, quantized=False)), rank)
    assert losses[-1] < 0.9 * losses[0]
    assert abs(losses[-1] - high[-1]) < 0.1 * high[-1], (losses, high)


def merges(rank, name, dora):
    """A merge of shards is that of the whole, to the bit, with its figures; so are the codes that come back."""
    warnings.simplefilter("ignore")
    options = {"use_dora": True} if dora else {}
    whole, model = adapted(name, **options), shard(adapted(name, **options))
    before = digests(model)
    model(input_ids=tokens(rank)).logits.sum().backward()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    whole.merge_adapter()
    model.merge_adapter()
    assert digests(model) != before
    everything = StateDictOptions(full_state_dict=True)
    ours, theirs = get_model_state_dict(model, options=everything), whole.state_dict()
    assert rank or all(torch.equal(ours[key], theirs[key]) for key in theirs if "_codes" in key or "_scale" in key)
    for one, other in zip(merged(model), merged(whole), strict=True):
        assert one.name == other.name
        assert math.isclose(one.sqnr, other.sqnr, rel_tol=1e-6)
        assert math.isclose(one.change_sqnr, other.change_sqnr, rel_tol=1e-6)
    model.unmerge_adapter()
    assert digests(model) == before


def gathered_copies(rank, name):
    """A merge into what FSDP2 has gathered would be thrown away: it is refused, and leaves everything."""
    warnings.simplefilter("ignore")
    model = shard(adapted(name))
    before = digests(model)
    for layer in model.base_model.model.model.layers:
        layer.unshard()
    with pytest.raises(ValueError, match="gathered copy of a sharded weight"):
        model.merge_adapter()
    for layer in model.base_model.model.model.layers:
        layer.reshard()
    assert digests(model) == before


def documented_run(rank):
    """The page's lines, and the adapters that they save over a base of one process."""
    warnings.simplefilter("ignore")
    make, recipe, *_ = MODELS["gpt-oss"]
    torch.manual_seed(0)
    bare = make().bfloat16()
    batches = [tokens(rank)] * 3
    model = run_documented("QLoRA: FSDP2", model=copy.deepcopy(bare), batches=batches, folder="adapters")["model"]
    dist.barrier()
    base = bfp.convert(bare, recipe, filter_fn=lambda path, layer: path != "lm_head", compute="high_precision", keep_init=False)
    config = register(LoraConfig.from_pretrained("adapters"))
    loaded = PeftModel.from_pretrained(base, "adapters", config=config, autocast_adapter_dtype=False).eval().bfloat16()
    logits = model.eval()(input_ids=tokens(0)).logits
    assert any(param.abs().max() > 0 for name, param in loaded.named_parameters() if "lora_B" in name)
    torch.testing.assert_close(loaded(input_ids=tokens(0)).logits, logits, rtol=0.02, atol=0.02)


def llama_alike(rank):
    as_one_process(rank, "llama")
    gathered_copies(rank, "llama")


def gpt_oss_alike(rank):
    as_one_process(rank, "gpt-oss")


def deepseek_alike(rank):
    as_one_process(rank, "deepseek")


def llama_learns(rank):
    twenty_steps(rank, "llama")


def gpt_oss_learns(rank):
    twenty_steps(rank, "gpt-oss")


def deepseek_learns(rank):
    twenty_steps(rank, "deepseek")


def all_merge(rank):
    for name in MODELS:
        merges(rank, name, dora=False)
    merges(rank, "llama", dora=True)


@pytest.mark.parametrize(
    "function",
    ["llama_alike", "gpt_oss_alike", "deepseek_alike", "llama_learns", "gpt_oss_learns", "deepseek_learns", "all_merge"],
)
def test_two_processes(function):
    gloo.run(2, __file__, function)


def test_the_documented_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gloo.run(2, __file__, "documented_run")
