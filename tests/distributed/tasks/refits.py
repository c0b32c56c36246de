"""Refits on workers: what ranks store is made from logical arrays, and compared after the move."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils.prune import l1_unstructured

import shardmath as sm
import shardmath_torch as smt
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.megatron_shapes import logical_shapes
from shardmath.storage import Bound, Stored, fill, parse
from tests.distributed.tasks.device import DEVICE
from tests.distributed.tasks.dtensors import caught
from tests.refits.tables import CONFIG, ENGINE

LAYERS = CONFIG | {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}
"""Enough of them for virtual stages."""

COMPUTED = "self_attn.o_proj.*            = neg_exp(self_attn.o_proj.*)   : h (tp n hd)\n"

OWN = f"""
[model.layers.{{l}}. = model.layers.{{l}}.]
{COMPUTED}mlp.gate_up_proj.*            = mlp.[gate up]_proj.*          : (tp half (gate + up)) h
mlp.experts.w13_weight        = mlp.experts.{{e}}.[gate up]_proj.weight.T : e h (tp (gate + up))
"""
"""What this engine stores otherwise: computed, row by row in turn, transposed."""

Arrays = dict[str, NDArray[Any]]


def shapes() -> dict[str, tuple[tuple[int, ...], str]]:
    return dict(logical_shapes(LAYERS, vocab=10))


def trainer(ranks: range) -> Stored:
    return megatron(LAYERS, ranks=ranks, tp=2, pp=2, vpp=2, ep=2, etp=1, vocab=10, vocab_multiple=1)


def engine(ranks: range, computes: bool = True) -> Stored:
    tp = len(ranks)
    numbers = {"hd": 2, "rep": max(1, tp // 2), "vocab": 12, "half": 16 // tp}
    own = OWN if computes else OWN.replace(COMPUTED, "")
    return Stored(parse(ENGINE), (sm.Mesh(tp=tp, ranks=ranks),), numbers=numbers).extended(own)


def draw(seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    made = {}
    for name, (shape, _) in shapes().items():
        made[name] = random.standard_normal(shape).astype(np.float32)
    return made


def make(
    bound: Bound, arrays: Arrays, rank: int, functions: bool = False
) -> list[dict[str, Tensor]]:
    """What the rank stores, by chunk; what a function stores has been through it."""
    if functions:
        changed = {n: -np.exp(a) if ".o_proj." in n else a for n, a in arrays.items()}
    chunks: list[dict[str, Tensor]] = [{}, {}]
    for (chunk, name), array in fill(bound, changed if functions else arrays, rank).items():
        chunks[chunk][name] = torch.from_numpy(array).to(DEVICE)
    return chunks


def move(rank: int, ranks: range, steps: int) -> Any:
    """Refit after each of some steps; whether all that the engine stores, and all that is told, is right each time."""
    planned = sm.refit(trainer(range(4)), engine(ranks), shapes())
    refit = smt.Refit(planned, timeout=30.0)
    src = make(planned.trainer, draw(0), rank) if rank < 4 else None
    dst = None
    if rank in ranks:
        (dst, _) = make(planned.engines["engine"], {n: a * 0 for n, a in draw(0).items()}, rank)
        dst["kv_scale"] = torch.ones(1)
    refit.prepare(src, dst, own=["kv_scale"])
    right = []
    for step in range(steps):
        arrays = draw(step)
        if src is not None:
            overwrite(src, make(planned.trainer, arrays, rank))
        told: list[tuple[int, int]] = []
        refit(acknowledge=True, progress=lambda *numbers: told.append(numbers))  # noqa: B023
        last = refit.last
        assert last is not None and last.received.nbytes == planned.plan.received_bytes().get(
            rank, 0
        )
        assert told[-1] == (last.traffic.nbytes, last.traffic.nbytes)
        assert "finalizing" in last.seconds
        if dst is not None:
            (wanted, _) = make(planned.engines["engine"], arrays, rank, functions=True)
            right.append(_compare(dst, wanted))
    return right


def commit(rank: int, fails: int, in_block: bool) -> Any:
    """Three steps with commit="all", each in a block or not; in the second a function of rank `fails` has a fault.

    Of each: what is said, the version, and whether all that is stored is of that step, and of the one before.
    """
    planned = sm.refit(trainer(range(4)), engine(range(4, 8)), shapes())
    refit = smt.Refit(planned, timeout=30.0, commit="all")
    src = make(planned.trainer, draw(0), rank) if rank < 4 else None
    dst = None
    if rank >= 4:
        (dst, _) = make(planned.engines["engine"], {n: a * 0 for n, a in draw(0).items()}, rank)
    step = 0

    def neg_exp(tensor: Tensor) -> Tensor:
        if rank == fails and step == 1:
            raise ValueError("a function of the user's")
        return -torch.exp(tensor.float())

    refit.prepare(src, dst, functions={"neg_exp": neg_exp})
    found = []
    stored: list[dict[str, Tensor]] = []
    for step in range(3):
        if src is not None:
            overwrite(src, make(planned.trainer, draw(step), rank))
        (_, text) = caught(lambda: _in_block(refit) if in_block else refit()) or ("", "")
        is_new = is_old = True
        if dst is not None:
            (wanted, _) = make(planned.engines["engine"], draw(step), rank, functions=True)
            is_new = not _compare(dst, wanted)
            is_old = bool(stored) and all(torch.equal(t, stored[-1][n]) for n, t in dst.items())
            stored.append({name: tensor.clone() for name, tensor in dst.items()})
        found.append((text, refit.version, is_new, is_old))
    return found, refit.shadow_bytes == planned.plan.shadow_bytes()[rank]


def _in_block(refit: smt.Refit) -> None:
    with smt.commit(refit):
        refit()


def overwrite(own: list[dict[str, Tensor]], new: list[dict[str, Tensor]]) -> None:
    """As an optimizer does: in place."""
    for here, there in zip(own, new, strict=True):
        for name, tensor in there.items():
            here[name].copy_(tensor)


def _compare(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """The stored tensors that differ; a function is as exact as torch and numpy agree."""
    wrong = []
    for name, tensor in wanted.items():
        close = torch.allclose if ".o_proj." in name else torch.equal
        if not close(found[name], tensor):
            wrong.append(name)
    return wrong


def refuse(rank: int, fault: str) -> Any:
    """What each rank is told where rank 5's tensors do not fit, or have moved."""
    planned = sm.refit(trainer(range(4)), engine(range(4, 8)), shapes())
    refit = smt.Refit(planned, timeout=30.0)
    side = planned.trainer if rank < 4 else planned.engines["engine"]
    chunks = make(side, draw(0), rank)
    mine = chunks[0]
    if rank == 5 and fault == "missing":
        del mine["lm_head.weight"]
    if rank == 5 and fault == "in no row":
        mine["extra"] = torch.ones(1)
    if rank == 5 and fault == "dtype":
        mine["lm_head.weight"] = mine["lm_head.weight"].double()
    if rank == 5 and fault == "freed":
        mine["lm_head.weight"] = mine["lm_head.weight"].clone()  # numpy's memory cannot be freed
    try:
        refit.prepare(*((chunks, None) if rank < 4 else (None, mine)), functions=_functions(fault))
        if rank == 5:
            _disturb(mine, fault)
        refit(acknowledge=True)
    except sm.ExchangeError as error:
        return str(error)
    return None


def _functions(fault: str) -> dict[str, Any]:
    """What engine ranks make of some tensors."""

    def fail(tensor: Tensor) -> Tensor:
        raise ValueError("a function of the user's")

    return {"neg_exp": fail} if fault == "function" else {}


def _disturb(mine: dict[str, Tensor], fault: str) -> None:
    """Do to a prepared tensor what must not be done."""
    head = mine["lm_head.weight"]
    if fault == "moved":
        head.data = torch.ones(3, 8)
    if fault == "strides":
        head.data = head.data.view(8, 3).t()
    if fault == "shorter":
        head.data = head.data[:2]
    if fault == "freed":
        head.untyped_storage().resize_(0)


def swap_in_a_chunk(rank: int, chunk: int) -> Any:
    """What is said where a trainer's tensor of one virtual stage is replaced; names are equal in both."""
    planned = sm.refit(trainer(range(4)), engine(range(4, 8)), shapes())
    refit = smt.Refit(planned, timeout=30.0)
    side = planned.trainer if rank < 4 else planned.engines["engine"]
    chunks = make(side, draw(0), rank)
    refit.prepare(*((chunks, None) if rank < 4 else (None, chunks[0])))
    if rank == 0:
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        chunks[chunk][name].data = chunks[chunk][name].clone()
    try:
        refit()
    except sm.ExchangeError as error:
        return str(error)
    return None


def swap_inside_a_dtensor(rank: int) -> Any:
    """What is said where a DTensor of the trainer's got other memory: the parameter is the same object."""
    mesh = DeviceMesh("cpu", [0, 1])
    side = Stored(parse("w = w : (tp n) h"), (sm.Mesh(tp=2),))
    planned = sm.refit(
        side, Stored(parse("w = w"), (sm.Mesh(ranks=[2]),)), {"w": ((4, 3), "float32")}
    )
    refit = smt.Refit(planned, timeout=30.0)
    src = {}
    if rank < 2:
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        src = dict(module.named_parameters())
    refit.prepare(src or None, {"w": torch.empty(4, 3)} if rank == 2 else None)
    refit()
    if rank < 2:
        module.to(torch.float64).to(torch.float32)
    try:
        refit()
    except sm.ExchangeError as error:
        return str(error)
    return None


def free_and_take_again(rank: int) -> Any:
    """What is said where a tensor's memory was freed, and other memory of it came to lie at the same address."""
    side = Stored(parse("w = w"), (sm.Mesh(ranks=[0]),))
    to = Stored(parse("w = w"), (sm.Mesh(ranks=[1]),))
    planned = sm.refit(side, to, {"w": ((1 << 22,), "float32")})
    refit = smt.Refit(planned, timeout=30.0)
    own = {"w": torch.empty(1 << 22)}
    refit.prepare(own if rank == 0 else None, own if rank == 1 else None)
    if rank == 0:
        address = own["w"].data_ptr()
        own["w"].untyped_storage().resize_(0)
        tries = [torch.empty(1 << 22) for _ in range(8)]
        own["w"].data = next((t for t in tries if t.data_ptr() == address), tries[0])
    try:
        refit()
    except sm.ExchangeError as error:
        return str(error)
    return None


def _made(value: float) -> torch.nn.Module:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.full((4, 3), value))
    module.register_buffer("b", torch.full((4, 3), value))
    return module


def _assign(module: Any, given: Any) -> None:
    module.load_state_dict({n: t + 1 for n, t in module.state_dict().items()}, assign=True)


def _set_parameter(module: Any, given: Any) -> None:
    module.w = torch.nn.Parameter(torch.ones(4, 3))


def _set_buffer(module: Any, given: Any) -> None:
    module.b = torch.ones(4, 3)


def _set_entry(module: Any, given: Any) -> None:
    given["w"] = torch.ones(4, 3)


def _delete_parameter(module: Any, given: Any) -> None:
    del module.w


def _wrap_again(module: Any, given: Any) -> None:
    module.w = torch.nn.Parameter(module.w.data)
    given["b"] = module.b.detach()


def _parametrize(module: Any, given: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(module, "w", torch.nn.Identity())


def _normalize(module: Any, given: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(module, "w")


def _prune(module: Any, given: Any) -> None:
    l1_unstructured(module, "w", amount=1)


def _name_tied(module: torch.nn.Module) -> dict[str, Tensor]:
    """And let another module have one of them too."""
    named = _name_all(module)
    module.head = torch.nn.Module()
    module.head.w = named["w"]
    return named


def _untie(module: Any, given: Any) -> None:
    del module.head.w


def _clear(module: Any, given: Any) -> None:
    given.clear()


def _share_for_a_while(module: Any, given: Any) -> None:
    module.critic.w = torch.nn.Parameter(torch.ones(4, 3))


def _name_with_critic(module: torch.nn.Module) -> dict[str, Tensor]:
    """And let another module have the memory of one of them."""
    named = _name_all(module)
    module.critic = torch.nn.Module()
    module.critic.w = torch.nn.Parameter(named["w"].data)
    return named


class Telling(dict[str, Tensor]):
    """A mapping that may come to have nothing to say."""

    broken = False

    def get(self, key: str, default: Any = None) -> Any:
        if self.broken:
            raise OSError("it is closed")
        return super().get(key, default)


def _break(module: Any, given: Any) -> None:
    given.broken = True


def _move_own(module: Any, given: Any) -> None:
    given["scale"].data = torch.ones(2)
    given["scale"] = torch.ones(1)


def _name_all(module: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


REPLACED: dict[str, tuple[int, Any, Any]] = {
    "assigned": (0, _name_all, _assign),
    "a parameter": (0, _name_all, _set_parameter),
    "a buffer": (0, _name_all, _set_buffer),
    "an entry of src": (0, _name_all, _set_entry),
    "an entry of dst": (1, _name_all, _set_entry),
    "a mapping that raises": (0, _name_all, _break),
    "its own": (1, _name_all, _move_own),
    "a parameter, of a state dict": (0, lambda module: module.state_dict(), _set_parameter),
    "a deleted parameter": (1, _name_all, _delete_parameter),
    "the same memory": (0, _name_all, _wrap_again),
    "a parametrization": (0, _name_all, _parametrize),
    "weight norm": (0, _name_all, _normalize),
    "pruned": (0, _name_all, _prune),
    "a tied parameter that is deleted in one module": (0, _name_tied, _untie),
    "a mapping without entries": (1, _name_all, _clear),
    "memory that was shared": (0, _name_with_critic, _share_for_a_while),
}
"""The rank that does it, what it gives, and what it does between two moves."""


def replace(rank: int) -> Any:
    """What is said where another tensor came into the place of a prepared one, by what was done."""
    sides = [Stored(parse("w = w\nb = b"), (sm.Mesh(ranks=[own]),)) for own in (0, 1)]
    planned = sm.refit(*sides, dict.fromkeys("wb", ((4, 3), "float32")))
    refit = smt.Refit(planned, timeout=30.0)
    told: dict[str, Any] = {}
    for case, (odd, name, act) in REPLACED.items():
        module = _made(float(rank))
        given = Telling({**name(module), "scale": torch.ones(1)}) if rank < 2 else None
        refit.prepare(given if rank == 0 else None, given if rank == 1 else None, own=["scale"])
        refit()
        if rank == odd:
            act(module, given)
        told[case] = caught(refit)
    return told


def gathered(rank: int) -> Any:
    """Whether an engine has what is trained, though FSDP2 has gathered parameters in its place; and what is said where
    that was replaced."""
    module = torch.nn.Sequential(OrderedDict(layer=torch.nn.Linear(3, 4, bias=False)))
    mesh = DeviceMesh("cpu", [0, 1])
    side = Stored(parse("layer.weight = layer.weight : (tp n) h"), (sm.Mesh(tp=2),))
    to = Stored(parse("layer.weight = layer.weight"), (sm.Mesh(ranks=[2]),))
    refit = smt.Refit(sm.refit(side, to, {"layer.weight": ((4, 3), "float32")}), timeout=30.0)
    engine_has = {"layer.weight": torch.zeros(4, 3)} if rank == 2 else None
    if rank < 2:
        fully_shard(module, mesh=mesh)
        with torch.no_grad():
            module.layer.weight.fill_(5.0)
    refit.prepare(dict(module.named_parameters()) if rank < 2 else None, engine_has)
    is_gathered = None
    if rank < 2:
        with torch.no_grad():
            module(torch.ones(1, 3))
        is_gathered = not isinstance(module.layer.weight, DTensor)
    refit()
    if rank < 2:
        module.reshard()  # type: ignore[operator]
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
    said = caught(refit)
    return is_gathered, None if engine_has is None else engine_has["layer.weight"].tolist(), said


def _keep_gathered(module: Any, mesh: DeviceMesh) -> None:
    fully_shard(module.layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)


def _shard_all(module: Any, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)


def _keep_storage(module: Any, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)
    module.set_keep_unsharded_storage(True)


def _round(module: Any, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _forward(module: Any) -> float:
    with torch.no_grad():
        return float(module(torch.ones(1, 3))[0, 0])


def _fail(module: Any) -> None:
    _forward(module)
    with suppress(RuntimeError):
        module(torch.ones(1, 2))


def _gather_ahead(module: Any) -> None:
    module.unshard(async_op=True)


SERVED: dict[str, tuple[int, Any, Any]] = {
    "a root": (4, _shard_all, _forward),
    "a root, of which a rank has nothing": (1, _shard_all, _forward),
    "kept gathered": (4, _keep_gathered, _forward),
    "kept after a forward that failed": (4, _keep_gathered, _fail),
    "mixed precision": (4, _round, _forward),
    "gathered ahead": (4, _shard_all, _gather_ahead),
    "replicas": (4, _shard_all, _forward),
}
"""The rows of a weight, how FSDP2 divides an engine, and what happens between two moves."""
if hasattr(FSDPModule, "set_keep_unsharded_storage"):  # from torch 2.15 on
    SERVED["kept memory"] = (4, _keep_storage, _forward)


def serve(rank: int, cases: list[str]) -> Any:
    """What forwards of an engine give before a move and after others, where FSDP2 has gathered parameters; and what is
    said where those are given as a destination."""
    flat = DeviceMesh("cpu", [0, 1])
    grid = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replica", "dp"))
    told: dict[str, Any] = {}
    for case in cases:
        rows, divide, act = SERVED[case]
        module = torch.nn.Sequential(OrderedDict(layer=torch.nn.Linear(3, rows, bias=False)))
        text = "layer.weight = layer.weight" + ("" if case == "replicas" else " : (tp~ n) h")
        sides = [Stored(parse("layer.weight = layer.weight"), (sm.Mesh(ranks=[2]),))]
        sides += [Stored(parse(text), (sm.Mesh(tp=2),))]
        refit = smt.Refit(sm.refit(*sides, {"layer.weight": ((rows, 3), "float32")}), timeout=30.0)
        trained = {"layer.weight": torch.ones(rows, 3)} if rank == 2 else None
        if rank < 2:
            divide(module, grid if case == "replicas" else flat)
        refit.prepare(trained, dict(module.named_parameters()) if rank < 2 else None)
        served = []
        for value in (5.0, 7.0):
            if rank < 2:
                act(module)
            if trained is not None:
                trained["layer.weight"].fill_(value)
            refit()
            served += [_forward(module)] if rank < 2 else []
        # Still gathered.
        given = dict(module.named_parameters()) if rank < 2 else None
        told[case] = served, caught(partial(refit.prepare, trained, given))
    return told


def contradict(rank: int) -> Any:
    """What is said of DTensors that lie as planned, or otherwise, by how."""
    grid = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    flipped = DeviceMesh("cpu", list(reversed(range(8))))
    flat = DeviceMesh("cpu", list(range(8)))
    whole = torch.arange(128.0).reshape(16, 8)
    module = torch.nn.Linear(8, 16, bias=False)
    parallelize_module(module, grid["tp"], ColwiseParallel())
    fully_shard(module, mesh=grid["dp"])
    eighth = sm.Mesh(world=8)
    both = sm.Mesh(dp=4, tp=2)
    shapes = {"w": ((16, 8), "float32")}
    cases: dict[str, tuple[Any, Any]] = {
        "as planned": ("w = w : (world n) h", distribute_tensor(whole, flat, [Shard(0)])),
        "strided, as planned": ("w = w : (tp dp n) h", module.weight),
        "strided, as a plain side": (
            sm.Layout((16, 8), both, "(tp dp n) h", dtype="float32"),
            module.weight,
        ),
        "transposed, as planned": (
            "w = w.T : (world h) n",
            distribute_tensor(whole.T, flat, [Shard(0)]),
        ),
        "strided": ("w = w : (dp tp n) h", module.weight),
        "a plain side": (sm.Layout((16, 8), both, "(dp tp n) h", dtype="float32"), module.weight),
        "flipped": ("w = w : (world n) h", distribute_tensor(whole, flipped, [Shard(0)])),
        "partial": ("w = w", DTensor.from_local(whole / 8, flat, [Partial()])),
    }
    told: dict[str, Any] = {}
    for case, (stored, tensor) in cases.items():
        side: Any = {"w": stored}
        if isinstance(stored, str):
            side = Stored(parse(stored), (both if "dp" in stored else eighth,))
        to = Stored(parse("w = w"), (sm.Mesh(ranks=[0]),))
        refit = smt.Refit(sm.refit(side, to, shapes), timeout=30.0)
        into = {"w": torch.zeros(16, 8)} if rank == 0 else None
        prepare = partial(refit.prepare, {"w": tensor}, into)
        told[case] = caught(prepare)
    return told


FUNCTIONS: dict[str, Any] = {
    "narrow": lambda tensor: -torch.exp(tensor).to(torch.bfloat16),
    "one number": torch.sum,
    "integers": lambda tensor: tensor.to(torch.int32),
    "nothing": lambda tensor: None,
}


def store_by(rank: int, function: str) -> Any:
    """What is said where an engine's tensor is made by this function."""
    side = Stored(parse("w = w"), (sm.Mesh(ranks=[0]),))
    to = Stored(parse("w = neg_exp(w)"), (sm.Mesh(ranks=[1]),))
    refit = smt.Refit(sm.refit(side, to, {"w": ((4, 3), "float32")}), timeout=30.0)
    own = {"w": torch.ones(4, 3)}
    functions = {"neg_exp": FUNCTIONS[function]}
    refit.prepare(own if rank == 0 else None, own if rank == 1 else None, functions=functions)
    return caught(lambda: refit(acknowledge=True))


def prepare_elsewhere(rank: int) -> Any:
    """What is said where a rank passes tensors of a side that it is not of, by what is wrong."""
    one = sm.refit(trainer(range(4)), engine(range(4, 8)), shapes())
    two = sm.refit(
        trainer(range(4)), {"prefill": engine(range(4, 8)), "decode": engine(range(6, 8))}, shapes()
    )
    tensors = {"lm_head.weight": torch.ones(3, 8)}
    cases: dict[str, tuple[Any, int, dict[str, Any]]] = {
        "src": (one, 5, {"src": tensors}),
        "dst": (one, 1, {"dst": tensors}),
        "dst of several": (two, 1, {"dst": [tensors]}),
        "an engine's name": (two, 1, {"dst": {"decode": tensors}}),
        "dst by chunk": (two, 6, {"dst": [tensors]}),
    }
    told: dict[str, Any] = {}
    for case, (planned, odd, wrong) in cases.items():
        refit = smt.Refit(planned, timeout=30.0)
        given = _fit(planned, rank) | (wrong if rank == odd else {})
        told[case] = caught(lambda: refit.prepare(**given))  # noqa: B023 (called at once)
    return told


def _fit(planned: sm.Refit, rank: int) -> dict[str, Any]:
    """Tensors that are right for the rank."""
    engines = {}
    for name, bound in planned.engines.items():
        if rank in bound.ranks:
            engines[name] = make(bound, draw(0), rank)[0]
    src = make(planned.trainer, draw(0), rank) if rank in planned.trainer.ranks else None
    one = next(iter(engines.values()), None)
    return {"src": src, "dst": one if len(planned.engines) == 1 else engines}


def prepare_nonsense(rank: int) -> Any:
    """What all are told where one rank passes no tensors at all."""
    planned = sm.refit(trainer(range(4)), engine(range(4, 8)), shapes())
    refit = smt.Refit(planned, timeout=30.0)
    side = planned.trainer if rank < 4 else planned.engines["engine"]
    chunks = make(side, draw(0), rank)
    given: Any = 5 if rank == 6 else chunks[0]
    try:
        refit.prepare(*((chunks, None) if rank < 4 else (None, given)))
    except sm.ExchangeError as error:
        return str(error)
    return None


def into_inference_tensors(rank: int) -> Any:
    """What differs in an engine whose tensors were made in inference mode."""
    planned = sm.refit(trainer(range(4)), engine(range(4, 8)), shapes())
    refit = smt.Refit(planned, timeout=30.0)
    src = make(planned.trainer, draw(2), rank) if rank < 4 else None
    dst = None
    if rank >= 4:
        with torch.inference_mode():
            (zeros, _) = make(
                planned.engines["engine"], {n: a * 0 for n, a in draw(2).items()}, rank
            )
            dst = {name: tensor.clone() for name, tensor in zeros.items()}
    refit.prepare(src, dst)
    refit()
    if dst is None:
        return []
    (wanted, _) = make(planned.engines["engine"], draw(2), rank, functions=True)
    return _compare(dst, wanted)


def learn(rank: int) -> Any:
    """What differs in an engine where each side tells the other how it stores, as text."""
    told: list[Any] = [trainer(range(4)).to_json() if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    asked: list[Any] = [engine(range(4, 8)).to_json() if rank == 4 else None]
    dist.broadcast_object_list(asked, src=4)
    planned = sm.refit(Stored.from_json(told[0]), Stored.from_json(asked[0]), shapes())
    refit = smt.Refit(planned, timeout=30.0)
    src = make(planned.trainer, draw(5), rank) if rank < 4 else None
    dst = None
    if rank >= 4:
        (dst, _) = make(planned.engines["engine"], {n: a * 0 for n, a in draw(5).items()}, rank)
    refit.prepare(src, dst)
    refit()
    if dst is None:
        return []
    (wanted, _) = make(planned.engines["engine"], draw(5), rank, functions=True)
    return _compare(dst, wanted)


def forget(rank: int) -> Any:
    """Whoever has not prepared is named on all ranks."""
    planned = sm.refit(trainer(range(4)), engine(range(4, 8)), shapes())
    refit = smt.Refit(planned, timeout=30.0)
    try:
        refit()
    except sm.ExchangeError as error:
        return str(error)
    return None


def move_to_two(rank: int) -> Any:
    """Two engines that share rank 6, each with tensors of its own."""
    engines = {"prefill": engine(range(4, 7 + 1)), "decode": engine(range(6, 8))}
    planned = sm.refit(trainer(range(4)), engines, shapes())
    refit = smt.Refit(planned, timeout=30.0)
    src = make(planned.trainer, draw(3), rank) if rank < 4 else None
    dst = {}
    for name, bound in planned.engines.items():
        if rank in bound.stored.meshes[0]:
            (dst[name], _) = make(bound, {n: a * 0 for n, a in draw(3).items()}, rank)
    refit.prepare(src, dst)
    refit()
    wrong = []
    for name, natives in dst.items():
        (wanted, _) = make(planned.engines[name], draw(3), rank, functions=True)
        wrong += _compare(natives, wanted)
    return len(dst), wrong


def from_fsdp(rank: int) -> Any:
    """A module under FSDP2, of which four ranks have uneven shards, into an engine that fuses its projections."""
    of = {"q.weight": ((5, 6), "float32"), "k.weight": ((3, 6), "float32")}
    table = "qk.weight = [q k].weight : (q + k | tp n) h"
    fused = Stored(parse(table), (sm.Mesh(tp=2, ranks=range(4, 6)),))
    device_mesh = DeviceMesh(DEVICE, range(4))
    module = torch.nn.Module()
    module.q = torch.nn.Linear(6, 5, bias=False, device=DEVICE)
    module.k = torch.nn.Linear(6, 3, bias=False, device=DEVICE)
    for seed, layer in enumerate(module.children()):
        with torch.no_grad():
            numbers = torch.arange(layer.weight.numel(), device=DEVICE)
            layer.weight.copy_(numbers.view_as(layer.weight) + 100 * seed)
    layouts: Any = None
    if rank < 4:
        fully_shard(module, mesh=device_mesh)
        layouts = smt.layout_of(module)
    told = [layouts]
    dist.broadcast_object_list(told, src=0)
    planned = sm.refit(told[0], fused, of)
    refit = smt.Refit(planned, timeout=30.0)
    engine_has = {"qk.weight": torch.empty(4, 6, device=DEVICE)} if rank in (4, 5) else None
    refit.prepare(dict(module.named_parameters()) if rank < 4 else None, engine_has)
    refit()
    return None if engine_has is None else engine_has["qk.weight"].tolist()
