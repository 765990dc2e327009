"""`AdamW` and `Adam` for quantized, plain and sharded parameters.

One kernel call updates all parameters of a device: it reads gradients and updates masters and moments. If a weight's blocks
don't cross ranks, the same pass writes its codes and scales. If they need the whole weight's amax (one scale per tensor,
NVFP4), a GPU finds it in that pass and a second call writes the codes. On a CPU, or if blocks cross ranks, `requantize_` makes
the codes from the masters. Without kernels, `definition.adamw` gives the same bits.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from blockfp.definition import adamw
from blockfp.definition.adamw import Coefficients
from blockfp.definition.oscillation import OsciReset
from blockfp.definition.rounding import Key, key_words
from blockfp.kernels.step_table import Table

from ..ops import cuda
from ..ops.kernels import kernels_for
from ..ops.library import outside_graphs
from ..ops.optimizer import cuda_steps
from ..quantized_tensor import agreement, sharding
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from ..torch_internals import foreach_add_, version_of
from . import optimizer_state
from .local_parameter import MOMENT_NAMES, LocalParameter
from .optimizer_state import needs_master, new_master, new_moments, renew_master
from .optimizer_step import begin_on_device, carry_out, coefficients
from .osci_reset import Windows, check_group, check_keeps_codes, new_paths, resets

_told: set[tuple[int, int]] = set()
_turns = threading.local()
"""`last` is a weak reference to the optimizer whose stochastically rounded step came last in this thread."""


class _Adam(Optimizer):
    """Adam with all options; AdamW and Adam differ only in weight decay."""

    # torch's GradScaler then passes its scale and found_inf instead of unscaling the gradients itself.
    _step_supports_amp_scaling = True
    _decoupled: bool
    _eps = "eps"
    """The setting that AdamW adds to the root of the second moment."""

    def __init__(self, params, settings, key, of_torch):
        self._refuse(of_torch)
        first, second = key_words(0 if key is None else key)
        words = (int(first) & 0xFFFFFFFF, int(second) & 0xFFFFFFFF)
        super().__init__(params, settings | {"key": words, "osci_reset": None})
        self._prepare()

    def _prepare(self) -> None:
        self._known: dict[int, LocalParameter] = {}
        self._agreed = False
        self._tables: dict[torch.device, Table] = {}
        self._find_rounding()
        self.register_state_dict_post_hook(optimizer_state.show, prepend=True)
        self.register_load_state_dict_pre_hook(optimizer_state.make)
        self.register_load_state_dict_post_hook(optimizer_state.take, prepend=True)

    def __getstate__(self) -> dict[str, Any]:
        optimizer_state.renew_masters(self)  # pickled parameters don't record that values were loaded
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = not self.__dict__  # torch's load_state_dict also calls this
        super().__setstate__(state)
        for group in self.param_groups:  # pickles of other versions may lack it
            group.setdefault("osci_reset", None)
        if copied:  # copies and pickles lose the hooks
            self._prepare()

    def _refuse(self, settings: dict[str, Any]) -> None:
        if unfit := optimizer_state.unsupported_setting(settings, decoupled=self._decoupled):
            raise ValueError(
                f"{unfit}: not supported by {type(self).__name__}; to maximize, negate the loss; Adam's weight decay is "
                "a term of the gradient, AdamW's is not"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; see `torch.optim.Optimizer`.

        Raises:
            ValueError: a setting is invalid.
            TypeError: a parameter's dtype is not supported.
        """
        params = param_group["params"]
        param_group = {**param_group, "params": [params] if isinstance(params, Tensor) else list(params)}
        settings = self.defaults | param_group
        self._refuse(param_group)
        self._check(settings)
        for i, param in enumerate(param_group["params"]):
            name, param = param if isinstance(param, tuple) else (i, param)
            # torch rejects non-tensors; frozen parameters may have any dtype.
            if isinstance(param, Tensor) and param.requires_grad:
                _check_dtype(name, param, settings["master"])
                if settings["osci_reset"] is not None:
                    check_keeps_codes(param, f" {name}")
        super().add_param_group(param_group)
        self._find_rounding()

    def _check(self, settings: dict[str, Any]) -> None:
        """Raises ValueError if a group's settings are invalid."""
        lr, master = settings["lr"], settings["master"]
        if master not in ("float32", None):
            raise ValueError(f"master must be 'float32' or None, got {master!r}")
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}")
        adamw.check_settings(*(settings[name] for name in ("lr", "betas", self._eps, "weight_decay", "moments")))
        if settings["osci_reset"] is not None:
            check_group(settings)

    def _find_rounding(self) -> None:
        """Records whether steps round stochastically."""
        settings = [(group["master"], group["moments"]) for group in self.param_groups]
        self._rounds, self._began = any(one != ("float32", "float32") for one in settings), False

    def _note_turn(self) -> None:
        """Warns once if optimizers with equal keys alternate their steps, and so round with the same random bits.

        Consecutive runs don't warn: no optimizer steps again after another one's first step.
        """
        last: Any = getattr(_turns, "last", lambda: None)()
        key = tuple(self.param_groups[0].get("key", self.defaults["key"]))
        in_turn = self._began and last is not self and not _told
        if in_turn and last is not None and tuple(last.param_groups[0].get("key", last.defaults["key"])) == key:
            _told.add(key)
            warnings.warn(
                f"two optimizers that round stochastically have key={key} and both number their parameters from 0, so "
                "they round by the same random bits. Give each its own key, equal on every rank, such as key=1",
                UserWarning,
                stacklevel=4,
            )
        _turns.last, self._began = weakref.ref(self), True

    @torch.no_grad()
    def make_state(self) -> None:
        """Creates the state of every trained parameter that has none, as its first step would."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    self._state_of(LocalParameter(param), group)

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; parameters without a gradient don't change.

        Sharded quantized weights may need collectives: every rank that holds a shard of a parameter must call it. In the first
        step these ranks compare the settings of all groups. The step writes shards. If FSDP2 still holds gathered weights
        (after a forward without a backward, or with `set_reshard_after_backward(False)`), call `reshard()` on its modules.

        Args:
            closure: evaluates the loss again and returns it.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: in the first step, on all ranks, if their settings differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._rounds:
            self._note_turn()
        self._step()
        return loss

    def _agree(self) -> None:
        """Compares the settings of all ranks that share parameters, once."""
        meshes = [sharding.mesh_of(param) for group in self.param_groups for param in group["params"]]
        for mesh in dict.fromkeys(mesh for mesh in meshes if mesh is not None):
            if mesh.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
                return
            groups, device = agreement.groups_of(mesh), torch.device(mesh.device_type)
            agreement.agree(groups, agreement.settings_of(self), device, "it must be the same on all")
        self._agreed = True

    def _step(self) -> None:
        if not self._agreed:
            self._agree()
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        number = 0
        todo: list[LocalParameter] = []
        watched: dict[int, OsciReset] = {}
        try:
            for group in self.param_groups:
                first = len(todo)
                for param in group["params"]:
                    gradient = param.grad
                    if gradient is not None:
                        # Keyed by id: cached layout facts hold for any parameter with the same layout.
                        one = self._known.get(id(param)) or self._known.setdefault(id(param), LocalParameter())
                        todo.append(one)
                        one.find(param)
                        one.take_gradient(gradient)
                        one.number, one.state = number, self._state_of(one, group)
                    number += 1
                if len(todo) > first and not self._begin(group, todo[first:], found, scale):
                    return
                if group["osci_reset"] is not None:
                    watched |= dict.fromkeys(range(first, len(todo)), OsciReset(*group["osci_reset"]))
            # The key is stored with the settings, so a resumed run rounds identically. torch's own states have no key.
            windows = Windows(todo, watched) if watched else None
            self._carry_out(todo, tuple(self.param_groups[0].get("key", self.defaults["key"])))
            increment_version([one.held for one in todo])
            for one in todo:
                one.version = version_of(one.held)
            if windows is not None:
                windows.close()
        finally:
            LocalParameter.forget(todo)

    def _carry_out(self, todo: list[LocalParameter], key: tuple[int, int]) -> None:
        carry_out(todo, key, self._tables)

    def _moment_names(self, param: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the names of a parameter's moments."""
        del param, group
        return MOMENT_NAMES

    def _state_of(self, one: LocalParameter, group: dict[str, Any]) -> dict[str, Tensor]:
        state = self.state[one.param]
        if not state:
            on = one.local.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on)
            state |= new_moments(one, group["moments"], self._moment_names(one.param, group))
        if "master" in state:
            if isinstance(one.local, QuantizedTensor):
                written = one.local.geometry.loaded is not None or one.local.geometry.initial is not None
            else:
                written = one.version != version_of(one.held)
            if written:
                renew_master(one, state)
        elif needs_master(one, group["master"]):
            state["master"] = new_master(one)
        if group["osci_reset"] is not None:
            check_keeps_codes(one.param)
            if resets(one, state):
                state |= new_paths(one, state)
        return state

    def _begin(self, group: dict[str, Any], todo: list[LocalParameter], found: Tensor | None, scale: Tensor | None) -> bool:
        """Counts the step and computes its coefficients; returns False if the host already knows that the step is skipped."""
        steps: list[Tensor] = [one.state["step"] for one in todo]
        lr, settings = group["lr"], (group["betas"], group[self._eps], group["weight_decay"])
        if group["capturable"]:
            begin_on_device(todo, steps, lr, settings, self._decoupled, found, scale)
            return True
        if found is not None and found.item() != 0:
            return False
        unscale = 1.0 if scale is None else 1.0 / scale.item()
        lr = lr.item() if isinstance(lr, Tensor) else lr
        numbers = cuda_steps.count_steps(steps) if kernels_for(todo[0].gradient) is cuda else None
        if numbers is None:
            foreach_add_(steps, 1)
            numbers = [int(step.item()) for step in steps]
        known: dict[tuple[int, float | None], Coefficients] = {}
        for one, number in zip(todo, numbers, strict=True):
            alike = number, one.ratio
            if alike not in known:
                c = coefficients(number, lr, settings, self._decoupled, one.ratio)
                known[alike] = c._replace(unscale=unscale)
            one.step, one.coefficients = number, known[alike]
        return True


class AdamW(_Adam):
    """AdamW (decoupled weight decay) for quantized and plain parameters and DTensors of either.

    Args:
        params: parameters or parameter groups; each option below may differ by group, except `key`.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as in `torch.optim.AdamW`.
        master: "float32" keeps an fp32 master of every quantized or 16-bit parameter, initialized from the original values if
            the parameter keeps them (`initial`), else from its current values. None keeps no master: the step rounds
            stochastically to the parameter's own format.
        moments: "float32", or "bfloat16" or "fp8" to save memory, rounded stochastically (`definition.adamw`).
        key: seed, or two uint32 words, of that rounding; the same on every rank; 0 by default. Random bits depend on the key,
            the step and the parameter's index in this optimizer, so each optimizer of a model needs its own key.
        capturable: keep the step count on the device and read nothing back, for CUDA graphs.
        foreach, fused: accepted for compatibility with torch and ignored; a device's parameters always share one launch.
        amsgrad, maximize, differentiable: torch's; must be False.

    `state_dict` holds fp32 masters and moments, sharded as their parameters. `load_state_dict`, also of torch's own AdamW,
    keeps this optimizer's `moments`, `master` and `capturable`; a state that doesn't fit changes nothing.

    Raises:
        ValueError: a setting is invalid or unsupported.
        TypeError: a parameter is neither quantized nor float32, bfloat16 or float16.

    Example:
        >>> q = torch.nn.Parameter(quantize(torch.ones(32, 64), "mxfp8_e4m3_32x32"))
        >>> q.grad = torch.ones(32, 64)
        >>> AdamW([q], lr=0.5).step()
        >>> q.dequantize()[0, 0].item()
        0.5
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        master: Literal["float32"] | None = "float32",
        moments: adamw.Moments = "float32",
        key: Key | None = None,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ):
        of_torch = {"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable}
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"master": master, "moments": moments, "capturable": capturable}, key, of_torch)


class Adam(_Adam):
    """Adam: like `AdamW`, but weight decay is an L2 term of the gradient, 0 by default."""

    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        master: Literal["float32"] | None = "float32",
        moments: adamw.Moments = "float32",
        key: Key | None = None,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        decoupled_weight_decay: bool = False,
    ):
        of_torch = {"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable}
        of_torch["decoupled_weight_decay"] = decoupled_weight_decay
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"master": master, "moments": moments, "capturable": capturable}, key, of_torch)


def _check_dtype(name: str | int, param: Tensor, master: str | None) -> None:
    if param.dtype not in DTYPES:
        raise TypeError(
            f"parameter {name} of this group, of shape {tuple(param.shape)}, is {param.dtype}: it must be quantized, or one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    plain = not isinstance(sharding.local_of(param), QuantizedTensor)
    if master is None and param.dtype == torch.float16 and plain:
        raise ValueError("master=None is for quantized, bfloat16 and float32 parameters: float16 ones need a master")
