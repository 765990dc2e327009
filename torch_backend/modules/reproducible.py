"""`Reproducible`: losses and gradients of a batch with the same bits on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blockfp.definition.rounding import threefry2x32

from ..distributed_internals import fsdp_params, fsdp_params_of, fsdp_reduce_scatters
from ..quantized_tensor import agreement, sharding
from ..sharded.reduce_scatter import TreeSum, tree_sum
from ..torch_internals import foreach_copy_
from ..torch_internals import functional_collectives as collectives
from .experts import Experts
from .shared_products import SharedNorm
from .stateful_layer import StatefulLayer
from .unit_gradients import Progress, UnitReduction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Reproducible:
    """Runs a batch in units so that losses and gradients don't depend on the number of ranks, to the bit.

    A unit is one sequence or a few, with a forward and a backward of its own. Units are numbered over all ranks; each rank runs
    an equal number of consecutive ones. Losses, and gradients in float32, are added in a fixed binary tree over the unit
    numbers. Random bits of stochastic rounding depend on the unit. So all meshes whose data-parallel ranks divide the units
    give the same bits, even if a run moves between them through a checkpoint. For tensor parallelism use `parallelize(..,
    splits=)`, with the same splits everywhere, also on a mesh of one rank.

    Everything else must be equal: the device, versions, number of threads, and on a GPU
    `torch.use_deterministic_algorithms(True)` and, for compiled layers, the environment's `TORCHINDUCTOR_DETERMINISTIC=1`.

    Args:
        model: after `parallelize` and `fully_shard`, or neither. From then on only `backward` may compute its gradients.
        units: number of units in a batch, over all ranks: the ranks times a power of two.
        mesh: the one-axis mesh passed to `fully_shard`; None for an unsharded model.

    Attributes:
        own: this rank's unit numbers.

    Raises:
        TypeError: model is not a module, or mesh not a mesh.
        ValueError: units don't fit the ranks; the model has delayed scaling, batch norms, DistributedDataParallel, HSDP,
            experts on several ranks, layers sharded without splits or by other libraries, parameters not sharded over the mesh,
            or another custom reduce-scatter.

    Example:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> rows = torch.ones(4, 1, 2)
        >>> loss = Reproducible(layer, units=4).backward(lambda unit: layer(rows[unit]).sum())
        >>> layer.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(self, model: nn.Module, units: int, mesh: DeviceMesh | None = None):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        ranks, rank = _place(mesh)
        if isinstance(units, bool) or not isinstance(units, int) or units < 1 or units % ranks or not _power(units // ranks):
            raise ValueError(f"units must be the {ranks} ranks of mesh times a power of two, got {units!r}")
        _check_modules(model)
        _check_parameters(model, mesh)
        own = units // ranks
        self.model, self.mesh, self.units, self.own = model, mesh, units, range(rank * own, (rank + 1) * own)
        self._ranks, self._progress = ranks, Progress(units, own)
        self._stateful = [layer for layer in model.modules() if isinstance(layer, StatefulLayer)]
        self._reductions = self._attach()
        for layer in self._stateful:
            layer.keyed_by_unit = True

    def _attach(self) -> list[tuple[Any, UnitReduction]]:
        """Sets a `UnitReduction` as each FSDP module's reduce-scatter."""
        if not dist.is_available():
            return []
        from torch.distributed.fsdp import FSDPModule

        sharded: list[tuple[str, Any]] = [each for each in self.model.named_modules() if isinstance(each[1], FSDPModule)]
        for path, module in sharded:
            for other in fsdp_reduce_scatters(module):
                if not isinstance(other, UnitReduction) and not type(other).__module__.startswith("torch."):
                    raise ValueError(
                        f"{path or 'the model'} reduces by a {type(other).__name__} already: Reproducible sums in float32, so "
                        "leave out quantize_reduce_scatter and set_custom_reduce_scatter"
                    )
        pairs = [(module, UnitReduction(path or "the model", self._progress, self._ranks)) for path, module in sharded]
        for module, reduction in pairs:
            reduction.attach(module)
        return pairs

    def backward(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Runs this rank's units, forward and backward, and leaves the gradients of the units' mean loss in `.grad`.

        Existing gradients are added to. Clip with this package's `clip_grad_norm_`.

        Args:
            loss_of: returns the loss, of shape (), of a unit number. The loss may depend only on the number: torch's random
                generator (dropout) has another state on other meshes.

        Returns:
            The mean of all ranks' losses, float32 ().

        Raises:
            TypeError: the loss is not a tensor.
            ValueError: the loss has another shape, or a layer has got delayed scaling since.
            RuntimeError: a unit drew random numbers or gave gradients of other parameters than the first, or an FSDP2 module
                with parameters of its own took part in some units only, or twice in one.
        """
        if any(layer.linear_recipe.delayed is not None for layer in self._stateful):
            _check_modules(self.model)  # set_recipe changed it
        progress = self._progress
        for module, reduction in self._reductions:
            # Gradients belong to the shards, so parameters must be sharded.
            module.reshard()
            reduction.begin()
        parameters = dict(self.model.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        losses, trees = TreeSum(), {}
        names: set[str] | None = None
        try:
            with self._keys() as set_unit:
                for index, unit in enumerate(self.own):
                    progress.unit = index
                    set_unit(index)
                    drawn = _random_states()
                    loss = loss_of(unit)
                    _check_loss(loss)
                    loss.backward()
                    _check_nothing_drawn(drawn, unit)
                    losses.add(loss.detach())
                    names = self._collect(parameters, unit, names, trees)
            with_gradients = {id(parameter) for parameter in parameters.values() if parameter.grad is not None}
            for module, reduction in self._reductions:
                reduction.finish(has_gradients=any(id(p.sharded_param) in with_gradients for p in chain(*fsdp_params(module))))
        except BaseException:
            for name, parameter in parameters.items():
                parameter.grad = before[name]
            raise
        finally:
            progress.unit = None
        for name, parameter in parameters.items():
            if name in trees:
                assert parameter.grad is not None
                sharding.local_of(parameter.grad).copy_(trees[name].total().div_(self.units))
            old = before[name]
            if old is not None:
                parameter.grad = old if parameter.grad is None else old + parameter.grad
        return self._mean(losses.total())

    def _collect(
        self, parameters: dict[str, nn.Parameter], unit: int, names: set[str] | None, trees: dict[str, TreeSum]
    ) -> set[str]:
        """Adds gradients that FSDP2 doesn't reduce, and drops all but the last unit's."""
        found = {name for name, parameter in parameters.items() if parameter.grad is not None}
        if names is not None and found != names:
            raise RuntimeError(
                f"unit {unit} must give gradients of the same parameters as unit {self.own[0]}, but differs in "
                f"{', '.join(sorted(found ^ names))}"
            )
        for name in found:
            gradient = parameters[name].grad
            if not self._reductions:
                assert gradient is not None
                trees.setdefault(name, TreeSum()).add(sharding.local_of(gradient))
            if unit != self.own[-1]:
                parameters[name].grad = None
        return found

    @contextmanager
    def _keys(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that sets stochastic rounding's keys for one of this rank's units.

        Afterwards the keys are restored, and each layer's step has advanced as after one unit.
        """
        # Looked up each time, since `set_recipe` adds and removes keys.
        layers = [layer for layer in self._stateful if layer.rng_key is not None]
        if not layers:
            yield lambda index: None
            return
        if self._reductions:
            # The first gather, in a unit, would share the unit's keys.
            agreement.agree_on(fsdp_params_of(self.model))
        keys, steps = ([getattr(layer, name) for layer in layers] for name in ("rng_key", "step"))
        # int32 words with the bits of the uint32 ones.
        kept, first = torch.stack([key.detach() for key in keys]), [step.clone() for step in steps]
        words = kept.to(torch.int32)
        units = torch.arange(self.own[0], self.own[-1] + 1, dtype=torch.int32, device=words.device)[:, None]
        folded = threefry2x32((words[None, :, 0], words[None, :, 1]), (torch.zeros_like(units), units))
        of_units = torch.stack(folded, -1).to(kept.dtype) & 0xFFFFFFFF

        def set_unit(index: int) -> None:
            foreach_copy_(keys, list(of_units[index].unbind()))
            foreach_copy_(steps, first)

        try:
            yield set_unit
        finally:
            foreach_copy_(keys, list(kept.unbind()))

    def _mean(self, loss: Tensor) -> Tensor:
        if self.mesh is not None and self._ranks > 1:
            group = self.mesh.get_group().group_name
            loss = tree_sum(collectives.wait_tensor(collectives.all_gather_into_tensor(loss.view(1), self._ranks, group)))
        return loss.div_(self.units)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _power(number: int) -> bool:
    return number > 0 and not number & (number - 1)


def _place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Returns the number of ranks of a mesh, and this rank's index."""
    if mesh is None:
        return 1, 0
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have the one axis that fully_shard got, got {mesh}: sums over HSDP's replicas are NCCL's")
    return mesh.size(), mesh.get_local_rank()


def _check_modules(model: nn.Module) -> None:
    for path, module in model.named_modules():
        what = None
        if isinstance(module, DistributedDataParallel):
            what = "DistributedDataParallel sums over its ranks itself: use fully_shard"
        elif isinstance(module, _BATCH_NORMS):
            what = "its statistics cover a rank's own batches: use a norm of single tokens"
        elif isinstance(module, StatefulLayer) and module.linear_recipe.delayed is not None:
            what = f"the scales of {module.recipe} depend on all batches of a rank: use current or block scaling"
        elif isinstance(module, SharedNorm) and module.sequence:
            what = "with sequence parallelism its gradients are sums over each rank's tokens"
        elif isinstance(module, StatefulLayer | Experts) and (parallel := module.parallel) is not None:
            if parallel.style == "experts" and parallel.ranks > 1:
                what = "experts on several ranks get their tokens in an order that depends on the mesh"
            elif parallel.style != "experts" and parallel.splits is None:
                what = "it is sharded without pieces: pass parallelize(.., splits=), equal on every mesh"
        if what is not None:
            raise ValueError(f"{path or 'model'}, a {type(module).__name__}, is not reproducible on other meshes: {what}")


def _check_parameters(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Raises ValueError unless trained parameters are sharded over the mesh, and otherwise only by `parallelize`."""
    own = None if mesh is None else dist.get_process_group_ranks(mesh.get_group())
    # The group over which `parallelize` has sharded or replicated a parameter.
    cut: dict[Tensor, str] = {}
    for module in model.modules():
        by = module if isinstance(module, SharedNorm) else getattr(module, "parallel", None)
        if by is not None and isinstance(module, SharedNorm | StatefulLayer | Experts):
            cut |= dict.fromkeys(module.parameters(recurse=False), by.group)
    for path, parameter in model.named_parameters():
        dtensor = sharding.as_dtensor(parameter)
        sharded = False
        for axis, placement in enumerate(() if dtensor is None else dtensor.placements):
            assert dtensor is not None
            group = dtensor.device_mesh.get_group(axis)
            ranks = dist.get_process_group_ranks(group)
            if own is not None and ranks == own and not placement.is_replicate():
                sharded = True
            elif len(ranks) > 1 and cut.get(parameter) != group.group_name:
                raise ValueError(
                    f"{path} is placed as {placement} over ranks {ranks}, which are not the mesh of Reproducible: pass "
                    "the axis that fully_shard got; HSDP and other libraries' sharding are not reproducible on other "
                    "meshes"
                )
        if own is not None and len(own) > 1 and parameter.requires_grad and not sharded:
            raise ValueError(f"{path} is not sharded over {mesh}: apply fully_shard to the whole model on it")


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_of must return a tensor, got {type(loss).__name__}")
    if loss.shape != ():
        raise ValueError(f"loss_of must return a loss of shape (), got {tuple(loss.shape)}")


def _random_states() -> list[Tensor]:
    """Returns the states of torch's CPU generator and of the current GPU's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else states


def _check_nothing_drawn(before: list[Tensor], unit: int) -> None:
    if not all(map(torch.equal, before, _random_states())):
        raise RuntimeError(
            f"unit {unit} drew from torch's random generator (dropout?), which is in another state on other meshes: leave it "
            "out, or draw from a generator that is seeded by the step and the unit's number"
        )
