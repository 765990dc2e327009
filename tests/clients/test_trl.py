"""TRL's trainers over converted models: losses as over the values, references, references that follow, heads."""

import copy
import math

import pytest
import torch
from documented import run_documented
from hf_models import family
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import blockfp.torch as bfp

pytest.importorskip("trl")

import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from blockfp.integrations.peft import register
from blockfp.integrations.transformers import BlockfpConfig

# What these packages warn of themselves; never of codes.
pytestmark = pytest.mark.filterwarnings("ignore", "error:.*(blockfp|quantized)")

EXACT = {"recipe": "nvfp4", "compute": "high_precision", "keep_init": False}


def tokenizer():
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(60))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def text(first, words=6):
    return " ".join(f"w{(first * 7 + word * 3) % 60}" for word in range(words))


def reward(completions, **_):
    return [float(len(set(completion.split()))) + completion.count("w1") for completion in completions]


ROWS = {
    "SFT": [{"text": text(row, 10)} for row in range(16)],
    "DPO": [{"prompt": text(row, 4), "chosen": " " + text(row + 1), "rejected": " " + text(row + 2)} for row in range(16)],
    "Reward": [{"chosen": text(row + 1), "rejected": text(row + 2)} for row in range(16)],
    "GRPO": [{"prompt": text(row, 4)} for row in range(16)],
}
SETTINGS = {"GRPO": {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("plain")
    family("Llama").save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(kind, model, *, adapters=False, settings=None, **options):
        arguments = getattr(trl, f"{kind}Config")(
            str(tmp_path), per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True, bf16=False,
            disable_tqdm=True, logging_steps=1, save_strategy="no", lr_scheduler_type="constant",
            **{"max_steps": 3, **SETTINGS.get(kind, {}), **(settings or {})},
        )  # fmt: skip
        if kind == "GRPO":
            options["reward_funcs"] = reward
        if adapters:
            task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
            options["peft_config"] = register(LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type=task))
        torch.manual_seed(0)
        return getattr(trl, f"{kind}Trainer")(
            model, args=arguments, train_dataset=Dataset.from_list(ROWS[kind]), processing_class=tokenizer(), **options
        )

    return make


def load(folder, kind="SFT"):
    torch.manual_seed(0)
    if kind == "Reward":
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(folder)


def converted(model, recipe="mxfp8", **options):
    return bfp.convert(model, recipe, filter_fn=lambda path, layer: path not in ("lm_head", "score"), **options)


def values_of(model, folder, kind):
    """A plain model of what the codes stand for."""
    plain = load(folder, kind)
    plain.load_state_dict(bfp.high_precision_state_dict(model))
    return plain


def parameters(model):
    return {name: value.clone() for name, value in bfp.high_precision_state_dict(model).items()}


def codes(model):
    return [part.clone() for param in model.parameters() if isinstance(param, bfp.QuantizedTensor) for part in param.parts]


def logged(run, key="loss"):
    return [entry[key] for entry in run.state.log_history if key in entry]


@pytest.mark.parametrize("kind", ROWS)
def test_adapters_learn_as_over_the_values(kind, folder, trainer):
    """DPO's and GRPO's reference is the model with its adapters disabled; GRPO generates between steps."""
    model = converted(load(folder, kind), **EXACT)
    plain, before = values_of(model, folder, kind), codes(model)
    assert len(before) == 14 * 3
    runs = [trainer(kind, one, adapters=True) for one in (model, plain)]
    for run in runs:
        torch.manual_seed(1)
        run.train()
    losses, expected = map(logged, runs)
    assert len(losses) == 3
    assert losses == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len(set(expected)) == 3
    adapters, others = ({name: one for name, one in run.model.named_parameters() if one.requires_grad} for run in runs)
    for name, one in adapters.items():
        assert torch.allclose(one, others[name], rtol=1e-2, atol=1e-4), name
        assert one.abs().max() > 0, name
    assert all(map(torch.equal, codes(runs[0].model), before))


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("kind", ROWS)
def test_every_parameter_is_trained(kind, weights, folder, trainer):
    model = converted(load(folder, kind), weights=weights)
    own = weights == "high_precision"
    options = {} if own else {"optimizers": (bfp.AdamW(model.parameters(), lr=1e-2), None)}
    before = parameters(model)
    run = trainer(kind, model, **options)
    run.train()
    after = parameters(run.model)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if torch.equal(value, after[name])] == []
    if kind == "SFT":
        losses = logged(run)
        assert losses[1] < losses[0]


@pytest.mark.parametrize("reference", ["copied", "precomputed", "path"])
def test_a_reference_is_the_policy_at_the_start(reference, folder, trainer):
    """TRL loads one from the path of the model's config, in high precision, where it is given nothing else."""
    if reference == "path":
        config = BlockfpConfig("mxfp8", weights="high_precision", modules_to_not_convert=["lm_head"])
        run = trainer("DPO", str(folder), quantization_config=config)
        assert sum(isinstance(layer, bfp.Linear) for layer in run.ref_model.modules()) == 14
    else:
        model = converted(load(folder))
        own = {"optimizers": (bfp.AdamW(model.parameters(), lr=1e-2), None)}
        options = {"ref_model": copy.deepcopy(model)} if reference == "copied" else {}
        run = trainer("DPO", model, settings={"precompute_ref_log_probs": reference == "precomputed"}, **own, **options)
    run.train()
    assert logged(run)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert logged(run, "rewards/margins")[0] == 0
    assert logged(run, "rewards/margins")[2] != 0


def test_the_reference_of_grpo_is_loaded_as_the_policy_is(folder, trainer):
    config = BlockfpConfig("mxfp8", weights="high_precision", modules_to_not_convert=["lm_head"])
    run = trainer("GRPO", str(folder), quantization_config=config)
    run.train()
    assert sum(isinstance(layer, bfp.Linear) for layer in run.ref_model.modules()) == 14
    assert logged(run, "kl")[0] == 0
    assert logged(run, "kl")[2] > 0


def test_a_frozen_copy_of_adapters_is_the_reference(folder, trainer):
    """Of a model that has adapters already, TRL makes another one, "ref", beside them."""
    model = converted(load(folder), **EXACT)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, register(config))
    before, run = codes(model), trainer("DPO", model)
    adapters = {name: one.clone() for name, one in model.named_parameters() if ".default." in name}
    run.train()
    assert logged(run)[0] == pytest.approx(math.log(2), abs=1e-6)
    for name, one in adapters.items():
        assert torch.equal(model.get_parameter(name.replace(".default.", ".ref.")), one)
        assert not torch.equal(model.get_parameter(name), one)
    assert all(map(torch.equal, codes(model), before))


SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.25, "max_steps": 1}


def test_a_reference_that_follows_is_the_mix(folder, trainer):
    model = converted(load(folder), weights="high_precision")
    before, reference = parameters(model), copy.deepcopy(model)
    trainer("DPO", model, ref_model=reference, settings=SYNC).train()
    after, mixed = parameters(model), parameters(reference)
    for name, one in mixed.items():
        assert not torch.equal(one, before[name]), name
        expected = 0.75 * before[name].double() + 0.25 * after[name].double()
        assert torch.allclose(one.double(), expected, rtol=1e-6, atol=1e-8), name


def test_a_reference_in_codes_follows_nobody(folder, trainer):
    model = converted(load(folder))
    reference = copy.deepcopy(model)
    before = codes(reference)
    run = trainer("DPO", model, ref_model=reference, settings=SYNC, optimizers=(bfp.AdamW(model.parameters(), lr=1e-2), None))
    with pytest.raises(NotImplementedError, match='convert with weights="high_precision"'):
        run.train()
    assert all(map(torch.equal, codes(reference), before))


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_quantized_head_is_refused(kind, weights, folder, trainer):
    """TRL multiplies with the head's weight itself, which no recipe would know of."""
    model = bfp.convert(load(folder), "mxfp8", weights=weights)
    assert isinstance(model.lm_head, bfp.Linear)
    with pytest.raises(
        NotImplementedError, match=r"leave the head out of convert: filter_fn=lambda path, layer: path != 'lm_head'"
    ):
        trainer(kind, model, optimizers=(bfp.AdamW(model.parameters()), None)).train()


def test_the_page(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = {"pairs": Dataset.from_list(ROWS["DPO"]), "tokenizer": tokenizer()}
    arguments = trl.DPOConfig(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1
    )
    space = run_documented("TRL", model=load(folder), arguments=arguments, **data)
    assert len(codes(space["trainer"].model)) == 14 * 3
    assert logged(space["trainer"])[0] == pytest.approx(math.log(2), abs=1e-6)
    space = run_documented("TRL: all weights", model=load(folder), arguments=arguments, **data)
    assert logged(space["trainer"])[0] == pytest.approx(math.log(2), abs=1e-6)
