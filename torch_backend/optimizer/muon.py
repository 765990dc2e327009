"""`Muon` for quantized, plain and sharded matrices, with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from blockfp.definition import adamw, muon
from blockfp.definition.muon import Settings
from blockfp.definition.rounding import Key

from .adamw import _Adam
from .local_parameter import MOMENTUM_NAME, LocalParameter
from .muon_step import carry_out_muon


class Muon(_Adam):
    """Muon for matrices, AdamW for other parameters, quantized or plain, and DTensors of either.

    The momentum of each matrix is orthogonalized whole, by one rank of its mesh, with the bits of one process on every mesh
    (FSDP2, HSDP, tensor parallelism, uneven shards). Ranks share the matrices by the work they need. Masters, moments, codes
    and random bits are `AdamW`'s.

    A matrix is [out, in]. The matrices of a 3-D parameter (experts) are orthogonalized one by one. Vectors and parameters of
    four or more axes take AdamW's steps, and so do groups with `use_muon=False`, as embeddings, the output layer and
    convolutions need: `Muon([{"params": matrices}, {"params": others, "use_muon": False, "lr": 3e-4}])`.

    Args:
        params: parameters or parameter groups; each option below may differ by group, except `key`.
        lr, weight_decay: of all parameters of a group.
        momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in `torch.optim.Muon`. `adjust_lr_fn` multiplies
            lr by sqrt(max(1, out / in)) ("original", or None) or by 0.2 sqrt(max(out, in)) ("match_rms_adamw").
        bias_correction: blend gradient and momentum as `optax.contrib.muon` does.
        ns_dtype: dtype of the Newton-Schulz iteration, "bfloat16" or "float32"; matrices travel in it.
        use_muon: whether the group's matrices are stepped by Muon.
        betas, adamw_eps: AdamW's.
        master, moments, key, capturable: as in `AdamW`; `moments` also stores the momentum.
        foreach, fused: accepted for compatibility with torch and ignored.
        maximize, differentiable: must be False.

    `load_state_dict` also takes a state of `torch.optim.Muon`.

    Raises:
        ValueError: a setting is invalid or unsupported.
        TypeError: a parameter is neither quantized nor float32, bfloat16 or float16.

    Example:
        >>> q = torch.nn.Parameter(quantize(torch.zeros(32, 64), "mxfp8_e4m3_32x32"))
        >>> q.grad = torch.eye(32, 64)
        >>> Muon([q], lr=0.5).step()
        >>> -0.6 < q.dequantize()[0, 0].item() < -0.35
        True
    """

    _decoupled = True
    _eps = "adamw_eps"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        bias_correction: bool = False,
        ns_dtype: str = "bfloat16",
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        master: str | None = "float32",
        moments: str = "float32",
        key: Key | None = None,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ):
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        settings |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        settings |= {"bias_correction": bias_correction, "ns_dtype": ns_dtype, "use_muon": use_muon}
        settings |= {"betas": betas, "adamw_eps": adamw_eps, "master": master, "moments": moments, "capturable": capturable}
        super().__init__(params, settings, key, {"maximize": maximize, "differentiable": differentiable})

    def _check(self, settings: dict[str, Any]) -> None:
        super()._check(settings)
        muon.check_settings(_settings(settings))
        if (adjust := settings["adjust_lr_fn"]) not in (None, *muon.RATIOS):
            raise ValueError(f"adjust_lr_fn must be None or one of {', '.join(map(repr, muon.RATIOS))}, got {adjust!r}")

    def _moment_names(self, param: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        return (MOMENTUM_NAME,) if _has_matrices(param, group) else super()._moment_names(param, group)

    def _state_of(self, one: LocalParameter, group: dict[str, Any]) -> dict[str, Tensor]:
        rms = muon.RATIOS.get(group["adjust_lr_fn"])
        one.ratio = muon.ratio(*one.whole, rms) if _has_matrices(one.param, group) else None
        return super()._state_of(one, group)

    def _begin(self, group: dict[str, Any], todo: list[LocalParameter], found: Tensor | None, scale: Tensor | None) -> bool:
        if not super()._begin(group, todo, found, scale):
            return False
        settings = _settings(group)
        options = {"nesterov": settings.nesterov, "bias_correction": settings.bias_correction}
        for one in todo:
            one.muon = settings, adamw.blend(one.step, settings.momentum, **options)
        return True

    def _carry_out(self, todo: list[LocalParameter], key: tuple[int, int]) -> None:
        super()._carry_out([one for one in todo if one.ratio is None], key)
        carry_out_muon([one for one in todo if one.ratio is not None], key)


def _settings(group: dict[str, Any]) -> Settings:
    return Settings(**{name: group[name] for name in Settings._fields})


def _has_matrices(param: Tensor, group: dict[str, Any]) -> bool:
    return group["use_muon"] and param.ndim in (2, 3)
