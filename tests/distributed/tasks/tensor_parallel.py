"""What workers do with tensor-parallel modules. Imported by workers, so no pytest here."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.tensors.dtensors.devicemesh import mesh_of
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks.dtensors import caught, device_mesh, part, whole
from tests.distributed.tasks.megatron import STYLES, Model, Scale, loss, model, parallel, words_of

NAMES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp_replicate", "dp_shard", "tp")}


def mesh_like(shape: tuple[int, ...]) -> DeviceMesh:
    """All eight ranks, the last axis for tensor parallelism."""
    return device_mesh(range(8), shape, NAMES[len(shape)])


def dp_of(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of data parallelism."""
    names = mesh.mesh_dim_names or ()
    return mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]


# A model


def sharded(module: nn.Module, mesh: DeviceMesh) -> None:
    """fully_shard of every block, and of what is left."""
    from torch.distributed.fsdp import fully_shard

    if mesh.ndim > 1:
        for block in getattr(module, "blocks", ()):
            fully_shard(block, mesh=dp_of(mesh))
        fully_shard(module, mesh=dp_of(mesh))


def data_parallel(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's number among the data-parallel ones, and how many there are."""
    tp = mesh.size(mesh.ndim - 1)
    return dist.get_rank() // tp, 8 // tp


def trained(rank: int, shape: tuple[int, ...], fsdp: bool, again: bool) -> dict[str, float]:
    """Two steps of two backwards each: of loss, gradients, their norm and weights, the worst difference."""
    mesh, ours, theirs = mesh_like(shape), model(), model()
    group = mesh.get_group("tp")
    smt.set_device_mesh(ours, mesh["tp"], styles=STYLES)
    if fsdp:
        sharded(ours, mesh)
    for block in ours.blocks:
        block.again = again
    at, n = data_parallel(mesh) if fsdp else (0, 1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs)]
    out: dict[str, float] = {}
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(2):
            with parallel(group):
                mine = loss(ours, words_of(at), group)
                mine.backward()
            each = [loss(theirs, words_of(i), None) for i in range(n)]
            sum(each[1:], each[0]).div(n).backward()
            worse(out, "loss", mine.detach() - each[at].detach())
        worse(out, "norm", norm_of(ours) - norm_of(theirs))
        compare(
            out,
            "gradient of ",
            ours,
            {k: p.grad for k, p in theirs.named_parameters(remove_duplicate=False)},
        )
        for optimizer in optimizers:
            optimizer.step()
    compare(out, "", ours, dict(theirs.named_parameters(remove_duplicate=False)))
    return out


def norm_of(module: nn.Module) -> Tensor:
    """The norm of all gradients, as torch has it."""
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def worse(out: dict[str, float], name: str, difference: Tensor) -> None:
    """Keep the largest."""
    out[name] = max(
        out.get(name, 0.0), float(difference.abs().max()) if difference.numel() else 0.0
    )


def compare(out: dict[str, float], prefix: str, ours: nn.Module, wanted: dict[str, Any]) -> None:
    """The worst difference from the whole tensor's part, of each parameter or its gradient."""
    layouts = smt.layout_of(ours)
    for name, p in ours.named_parameters(remove_duplicate=False):
        found = local_of(p.grad if prefix else p).detach()
        worse(
            out, prefix + name, found - part(layouts[name], dist.get_rank(), wanted[name].detach())
        )


# Layouts


class Parts(nn.Module):
    """A parameter of each kind, of any sizes."""

    def __init__(self, rows: int, columns: int, components: tuple[int, ...]) -> None:
        super().__init__()
        self.column, self.row = nn.Linear(columns, rows), nn.Linear(rows, columns)
        self.pair, self.qkv = nn.Linear(columns, 2 * rows), nn.Linear(columns, sum(components))
        self.words, self.norm = nn.Embedding(rows, columns), nn.LayerNorm(columns)
        self.scale, self.softmax_offset = Scale(rows), nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        """Anything that takes all of the local tensors."""
        total = x.sum()
        for child in self.children():
            total = total + child.weight.sum() + (child.bias.sum() if hasattr(child, "bias") else 0)
        return total + self.softmax_offset.sum()


PART_STYLES: dict[str, Any] = {
    "column": "column",
    "row": "row",
    "pair": smt.Fused(2),
    "words": "vocabulary",
    "scale": "row_norm",
    "softmax_offset": "softmax_offset",
}
DIVIDED = {"row.weight": 1, "row.bias": None, "norm.weight": None, "norm.bias": None}
"""The dimension that tensor parallelism divides, 0 for all others."""


def numbered(rows: int, columns: int, components: tuple[int, ...], device: str = "cpu") -> Parts:
    """Every weight is its element numbers."""
    with torch.device(device), torch.no_grad():
        module = Parts(rows, columns, components)
        for p in module.parameters():
            p.copy_(whole(tuple(p.shape)))
    return module


def by_hand(
    name: str, full: Tensor, components: tuple[int, ...], mesh: DeviceMesh, fsdp: bool
) -> Tensor:
    """What this rank holds of a whole weight: each component chunked over tp, then all of it over dp."""
    tp, t = mesh.size(mesh.ndim - 1), dist.get_rank() % mesh.size(mesh.ndim - 1)
    d = DIVIDED.get(name, 0)
    if d is not None:
        sizes = {"pair": [full.shape[0] // 2] * 2, "qkv": list(components)}.get(
            name.split(".")[0], [full.shape[d]]
        )
        full = torch.cat([one.chunk(tp, d)[t] for one in full.split(sizes, d)], d)
    if not fsdp or mesh.ndim == 1:
        return full
    n = mesh.size(mesh.ndim - 2)
    chunks = full.chunk(n)
    return [*chunks, *([full[:0]] * n)][dist.get_rank() // tp % n]


def laid(rank: int, shape: tuple[int, ...], sizes: tuple[Any, ...], how: str) -> Any:
    """Layouts before and after fully_shard, and whether they, and what is held, are as by hand."""
    mesh, components = mesh_like(shape), sizes[2]
    styles = {**PART_STYLES, "qkv": smt.Fused(components)}
    module, wanted = numbered(*sizes, device="meta" if how == "meta" else "cpu"), numbered(*sizes)
    wholes = {name: p.detach() for name, p in wanted.named_parameters()}
    if how == "local":
        for name, p in module.named_parameters():
            held = by_hand(name, p.data, components, mesh, False)
            p.data = held.mT.contiguous().mT if held.ndim > 1 else held
    smt.set_device_mesh(module, mesh["tp"], styles=styles, local=how == "local")
    before = differing(module, wholes, components, mesh, False, how != "meta")
    texts = {name: x.text for name, x in smt.layout_of(module).items()}
    sharded(module, mesh)
    if how == "meta":
        before |= differing(module, wholes, components, mesh, True, False)
        module.to_empty(device="cpu")
        for name, p in module.named_parameters():
            local_of(p).data.copy_(by_hand(name, wholes[name], components, mesh, True))
    after = differing(module, wholes, components, mesh, True, True)
    texts_after = {name: str(x) for name, x in smt.layout_of(module).items()}
    parts = (by_hand(name, full, components, mesh, False).sum() for name, full in wholes.items())
    with torch.no_grad():
        total = float(sum(parts, torch.ones(1)) - module(torch.ones(1)))
    return before, after, total, texts, texts_after


def differing(
    module: nn.Module,
    wholes: dict[str, Tensor],
    components: tuple[int, ...],
    mesh: DeviceMesh,
    fsdp: bool,
    values: bool,
) -> dict[str, Any]:
    """Parameters that are not as by hand, or not as their layouts."""
    out, layouts = {}, smt.layout_of(module)
    for name, p in module.named_parameters():
        held = by_hand(name, wholes[name], components, mesh, fsdp)
        found, said = local_of(p).detach(), part(layouts[name], dist.get_rank(), wholes[name])
        if not said.equal(held) or found.shape != held.shape or (values and not found.equal(held)):
            out[name] = (layouts[name].text, said.tolist(), held.tolist())
    return out


def changed_degree(
    rank: int, from_shape: tuple[int, ...], to_shape: tuple[int, ...], sizes: tuple[Any, ...]
) -> Any:
    """Moved by the layouts of two modules: parameters that are not as by hand. And one fused one, by redistribute."""
    components = sizes[2]
    styles = {**PART_STYLES, "qkv": smt.Fused(components)}
    ends, meshes = [], [mesh_like(from_shape), mesh_like(to_shape)]
    for mesh in meshes:
        module = numbered(*sizes)
        smt.set_device_mesh(module, mesh["tp"], styles=styles)
        sharded(module, mesh)
        ends.append(module)
    source, target = (
        {name: local_of(p).detach() for name, p in module.named_parameters()} for module in ends
    )
    for tensor in target.values():
        tensor.fill_(-1)
    layouts = [smt.layout_of(module) for module in ends]
    plan = sm.plan(*layouts)
    sm.verify(plan)
    smt.compile(plan)(source, out=target)
    wholes = {name: p.detach() for name, p in numbered(*sizes).named_parameters()}
    wrong = differing(ends[1], wholes, components, meshes[1], True, True)
    name = "qkv.weight"
    one = smt.redistribute(source[name], layouts[1][name], layout=layouts[0][name])
    return wrong, one.equal(by_hand(name, wholes[name], components, meshes[1], True))


def loaded(value: Any) -> Any:
    """Written by torch.save and read as torch.load reads by default."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def rows_of(tensor: DTensor) -> Any:
    """The whole of a DTensor's rows by their numbers, by what it says of itself; or why it does not say."""

    def act() -> list[int]:
        layout = smt.from_dtensor(tensor)
        moved = smt.redistribute(tensor, [Replicate()] * tensor.device_mesh.ndim).to_local()
        assert local_of(tensor).equal(part(layout, dist.get_rank(), moved))
        return (moved.flatten(1)[:, 0] // moved[0].numel()).long().tolist()  # type: ignore[no-any-return]

    return caught(act)


def fused_alike(mesh: DeviceMesh, device: str = "cpu") -> Parts:
    """Two fused weights of one shape and one label: `pair` of four components, `qkv` of three."""
    module = numbered(16, 8, (16, 8, 8), device)
    smt.set_device_mesh(
        module, mesh["tp"], styles={"pair": smt.Fused(4), "qkv": smt.Fused((16, 8, 8))}
    )
    return module


def with_gradients(module: nn.Module) -> dict[str, DTensor]:
    """Its parameters, each of which is its own gradient."""
    parameters = dict(module.named_parameters())
    for p in parameters.values():
        (p.to_local() * local_of(p).detach()).sum().backward()
    return parameters


def rows_of_fused(rank: int, fsdp: bool) -> dict[str, Any]:
    """The rows of both fused weights, by way of all that has them."""
    mesh = mesh_like((4, 2))
    module = fused_alike(mesh)
    if fsdp:
        sharded(module, mesh)
    parameters = with_gradients(module)
    state = module.state_dict()
    holders: dict[str, Any] = {
        "parameter": parameters,
        "gradient": {name: p.grad for name, p in parameters.items()},
        "state dict": state,
        "saved state dict": loaded(state),
    }
    other = fused_alike(mesh, "meta")
    if fsdp:
        sharded(other, mesh)
    other.to_empty(device="cpu")
    other.load_state_dict(loaded(state))
    holders["from the meta device"] = dict(other.named_parameters())
    if not fsdp:  # FSDP2 refuses all of these
        into = fused_alike(mesh, "meta")
        into.load_state_dict(loaded(state), assign=True)
        holders["assigned"] = dict(into.named_parameters())
        holders["copied module"] = dict(copy.deepcopy(module).named_parameters())
        holders["copied parameter"] = copy.deepcopy(parameters)
        holders["saved parameter"] = loaded(parameters)
        holders["pickled module"] = dict(pickle.loads(pickle.dumps(module)).named_parameters())
    holders["cast"] = dict(module.double().named_parameters())
    return {
        f"{how}: {name}": rows_of(by_name[f"{name}.weight"])
        for how, by_name in holders.items()
        for name in ("pair", "qkv")
    }


def copies_of_fused(rank: int, fsdp: bool) -> dict[str, Any]:
    """What is said of copies that nothing is recorded of; and of each where reading= says how it lies."""
    mesh = mesh_like((4, 2))
    module = fused_alike(mesh)
    if fsdp:
        sharded(module, mesh)
    parameters = with_gradients(module)
    optimizer = torch.optim.Adam(parameters.values())
    optimizer.step()
    qkv = parameters["qkv.weight"]
    given = torch.zeros(32, 8)
    on = {
        "layout": sm.Layout((32, 8), mesh_of(qkv.device_mesh), {}),
        "device_mesh": qkv.device_mesh,
    }
    copies = {
        "detached": qkv.detach(),
        "a clone": qkv.clone(),
        "computed": qkv * 2,
        "transposed": qkv.detach().t(),
        "optimizer state": optimizer.state[qkv]["exp_avg"],
        "of equal components": parameters["pair.weight"].detach(),
    }
    said = {name: caught(lambda one=one: smt.from_dtensor(one)) for name, one in copies.items()}
    said["a target"] = caught(lambda: smt.redistribute(given, qkv.placements, **on))
    other = numbered(16, 8, (16, 8, 8))
    smt.set_device_mesh(other, mesh["tp"], styles={"pair": "column", "qkv": smt.Fused(4)})
    if fsdp:
        sharded(other, mesh)
    said["loaded into others"] = caught(lambda: other.load_state_dict(module.state_dict()))
    everywhere = [Replicate()] * qkv.device_mesh.ndim
    alike = distribute_tensor(given, qkv.device_mesh, everywhere)
    state = {"qkv.weight": alike}
    said["a whole loaded"] = caught(lambda: module.load_state_dict(state, strict=False))
    return said


def moved_to_a_label(rank: int) -> Any:
    """Of a fused weight's copy, what it is by the reading asked for; and the gradient of a move to its placements."""
    mesh = mesh_like((4, 2))
    qkv = dict(fused_alike(mesh).named_parameters())["qkv.weight"]
    read = smt.from_dtensor(qkv.detach(), reading="placement").text
    weight = distribute_tensor(whole((32, 8)), mesh["tp"], [Replicate()]).requires_grad_()
    moved = smt.redistribute(weight, qkv.placements, reading="placement")
    (moved * moved.detach()).sum().backward()
    return read, local_of(weight.grad).equal(whole((32, 8)))


def saved_by_torch(rank: int, path: str, rows: int, styles: dict[str, Any]) -> Any:
    """Of DCP, saved under one degree and loaded under another: parameters that are not right, or why it refused."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    sizes = (rows, 8, (8, 4, 4))
    wholes = {name: p.detach() for name, p in numbered(*sizes).named_parameters()}
    for shape in ((4, 2), (2, 4)):
        mesh, module = mesh_like(shape), numbered(*sizes)
        smt.set_device_mesh(module, mesh["tp"], styles=styles)
        sharded(module, mesh)
        if shape == (4, 2):
            try:
                dcp.save(module.state_dict(), checkpoint_id=path)
            except CheckpointException as error:
                return str(error)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(-1)
    dcp.load(module.state_dict(), checkpoint_id=path)
    layouts = smt.layout_of(module)
    return [
        n
        for n, p in module.named_parameters()
        if not local_of(p).equal(part(layouts[n], rank, wholes[n]))
    ]


# What a module is afterwards


class Seen(nn.Module):
    """Keeps what its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8, bias=False)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [self.inner.weight, self.inner.other]
        return self.inner(x)  # type: ignore[no-any-return]


def local_inside(rank: int, fsdp: bool) -> Any:
    """Inside the forward: a local view of the parameter's memory, part of its graph. Outside: the parameter."""
    mesh, module = mesh_like((4, 2)), Seen()
    smt.set_device_mesh(module, mesh["tp"], styles={"inner": "column"})
    inner = module.inner
    if fsdp:
        sharded(module, mesh)
    inner.register_buffer("other", DTensor.from_local(torch.zeros(2), mesh["tp"]))
    outside = inner.weight is dict(module.named_parameters())["inner.weight"] and isinstance(
        inner.weight, DTensor
    )
    out = module(torch.ones(1, 4))
    view, parameter = module.seen[0], inner._parameters["weight"]
    same = view.data_ptr() == local_of(parameter).data_ptr() and tuple(view.shape) == (4, 4)
    out.sum().backward()
    gradient = inner.weight.grad
    return (
        outside and isinstance(inner.weight, DTensor) and tuple(inner.weight.shape) == (8, 4),
        same and not isinstance(view, DTensor) and view.requires_grad and not view.is_leaf,
        module.seen[1] is inner.other,
        isinstance(gradient, DTensor) and bool((local_of(gradient) == 1).all()),
        out.shape,
    )


def as_before(rank: int) -> Any:
    """repr, isinstance, signature, deepcopy, pickle, torch.save, state dicts, assignment and slices."""
    import inspect

    mesh, module = mesh_like((4, 2)), model()
    smt.set_device_mesh(module, mesh["tp"], styles=STYLES)
    group, texts = mesh.get_group("tp"), {n: str(x) for n, x in smt.layout_of(module).items()}
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(module),
        "pickle": pickle.loads(pickle.dumps(module)),
        "torch.save": torch.load(buffer, weights_only=False),
    }
    out = {
        "repr": repr(module) == repr(model()),
        "isinstance": isinstance(module, Model) and isinstance(module.blocks[0].up, nn.Linear),
        "signature": inspect.signature(module.forward) == inspect.signature(Model().forward),
        "shared": module.head.weight is module.embed.weight,
        "slice": len(module.blocks[:1]) == 1,
    }
    with parallel(group):
        wanted = module(words_of(0))
    for name, other in copies.items():
        with parallel(group):
            equal = other(words_of(0)).equal(wanted)
        apart = (
            other.head.weight is other.embed.weight and other.head.weight is not module.head.weight
        )
        out[name] = (
            equal and apart and {n: str(x) for n, x in smt.layout_of(other).items()} == texts
        )
        out[f"amax of {name}"] = {n: float(x) for n, x in smt.amax(other).items()} == {
            n: float(x) for n, x in smt.amax(module).items()
        }
    with torch.no_grad():
        module.blocks[0].up.weight = nn.Parameter(module.blocks[0].up.weight * 2)
    twice = local_of(module.blocks[0].up.weight).equal(
        2 * local_of(copies["pickle"].blocks[0].up.weight)
    )
    return out | {
        "assignment": twice,
        "layouts": {n: str(x) for n, x in smt.layout_of(module).items()} == texts,
    }


def state_dicts(rank: int, fsdp: bool) -> Any:
    """Out of one model and into another, before its first forward and after."""
    mesh, models = mesh_like((4, 2)), [model(0), model(1)]
    group = mesh.get_group("tp")
    for one in models:
        smt.set_device_mesh(one, mesh["tp"], styles=STYLES)
        if fsdp:
            sharded(one, mesh)
    out = []
    for _ in range(2):
        out.append(str(models[1].load_state_dict(models[0].state_dict())))
        with parallel(group):
            out.append(models[0](words_of(0)).equal(models[1](words_of(0))))
        for one in models:
            for part_ in one.modules():
                getattr(part_, "reshard", lambda: None)()
        with torch.no_grad():
            for p in models[0].parameters():
                p.mul_(2)
    return out


def not_after_fsdp(rank: int) -> Any:
    """deepcopy and pickle of a module that FSDP2 has divided are refused by torch and by pickle."""
    mesh, module = mesh_like((4, 2)), model()
    smt.set_device_mesh(module, mesh["tp"], styles=STYLES)
    sharded(module, mesh)
    out = []
    for act in (copy.deepcopy, pickle.dumps):
        try:
            act(module)
        except (AssertionError, pickle.PicklingError) as error:
            out.append(type(error).__name__)
    return out


def attributes(rank: int) -> Any:
    """requires_grad and what somebody wrote on a parameter stay; a shared one stays one."""
    mesh, module = mesh_like((4, 2)), model()
    module.norm.weight.requires_grad_(False)
    module.blocks[0].up.weight.tag = "kept"  # type: ignore[assignment]
    n = len(list(module.parameters()))
    with torch.inference_mode():  # which must not make parameters that take no step outside
        smt.set_device_mesh(module, mesh["tp"], styles={"head": "vocabulary"})
    return (
        any(parameter.is_inference() for parameter in module.parameters()),
        module.norm.weight.requires_grad,
        module.blocks[0].up.weight.tag,
        module.head.weight is module.embed.weight and len(list(module.parameters())) == n,
        smt.layout_of(module)["embed.weight"].text,
        {
            x.text
            for name, x in smt.layout_of(module).items()
            if name not in ("embed.weight", "head.weight")
        },
        all(isinstance(p, DTensor) for p in module.parameters()),
    )


def replaced(rank: int) -> str:
    """The layout of a parameter that took the place of one placed, and is divided otherwise."""
    mesh, module = mesh_like((4, 2)), nn.Sequential(nn.Linear(4, 4))
    smt.set_device_mesh(module, mesh["tp"], styles={"0": smt.Fused(2)})
    module[0].weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(1)]))
    return smt.layout_of(module)["0.weight"].text


def shared_module(rank: int) -> Any:
    """Layouts and largest values under both names of one module."""
    mesh, inner = mesh_like((4, 2)), nn.Linear(4, 4)
    module = nn.Sequential(inner, nn.ReLU(), inner)
    smt.set_device_mesh(module, mesh["tp"], styles={"2": smt.Fused(2)})
    texts = {name: x.text for name, x in smt.layout_of(module).items()}
    return texts, [*smt.amax(module)], module[0] is module[2]


def initialized(rank: int) -> Any:
    """A row-parallel Linear's own initialization, from the meta device: the largest, by the whole matrix's bound."""
    mesh = mesh_like((4, 2))
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4096, 4))
    smt.set_device_mesh(module, mesh["tp"], styles={"0": "row"})
    sharded(module, mesh)
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module[0].reset_parameters()
    return float(local_of(module[0].weight).detach().abs().max()) * 64


# Scales


def scales(rank: int, shape: tuple[int, ...], weights: str) -> Any:
    """amax of a module whose replicas differ, and the largest absolute values of each replica's wholes."""
    mesh, module = mesh_like(shape), numbered(4, 2, (4, 8))
    replica = rank // 4 if len(shape) == 3 else 0
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1).mul_(-1 - replica)
    wanted = {name: float(p.abs().max()) for name, p in module.named_parameters()}
    meshes = {
        "axes": lambda: mesh[mesh.mesh_dim_names[-2:]],
        "flat": lambda: mesh[mesh.mesh_dim_names[-2:]]._flatten("weights"),
        "tp": lambda: None,
    }
    smt.set_device_mesh(
        module, mesh["tp"], meshes[weights](), styles={**PART_STYLES, "qkv": smt.Fused((4, 8))}
    )
    if weights != "tp":
        sharded(module, mesh)
    calls, before = [], dist.all_reduce

    def counted(tensor: Tensor, **more: Any) -> Any:
        calls.append(dist.get_process_group_ranks(more["group"]))
        return before(tensor, **more)

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        found = smt.amax(module)
    finally:
        dist.all_reduce = before
    kinds = {(x.dtype, tuple(x.shape), x.requires_grad) for x in found.values()}
    return {name: float(x) for name, x in found.items()}, wanted, calls, kinds


def special(rank: int, dtype: str, value: float) -> Any:
    """amax where one element, on one rank, is special."""
    mesh = mesh_like((4, 2))
    module = nn.Sequential(
        nn.Linear(4, 2, bias=False).to(getattr(torch, dtype)), nn.Linear(4, 2, bias=False)
    )
    with torch.no_grad():
        module[0].weight.fill_(1)
        module[1].weight.fill_(-2)
        module[0].weight[1, 3] = -value if value == value else -torch.tensor(value)
    smt.set_device_mesh(module, mesh["tp"], mesh, styles={"0": "column"})
    sharded(module, mesh)
    return [(float(x), x.dtype) for x in smt.amax(module).values()]


# Errors


def refused(rank: int, what: str) -> Any:
    """What is said, and whether nothing has changed."""
    mesh, module = mesh_like((4, 2)), model()
    hybrid, tp = mesh_like((2, 2, 2)), mesh["tp"]
    small = nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(4))
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    graded = nn.Sequential(nn.Linear(4, 4))
    graded(torch.ones(4)).sum().backward()
    calls: dict[str, tuple[nn.Module, Any]] = {
        "2-D": (module, lambda: smt.set_device_mesh(module, mesh, styles=STYLES)),
        "no mesh": (module, lambda: smt.set_device_mesh(module, sm.Mesh(tp=2), styles=STYLES)),  # type: ignore[arg-type]
        "no name": (
            module,
            lambda: smt.set_device_mesh(module, device_mesh(range(8), (8,)), styles={}),
        ),
        "outside": (
            small,
            lambda: smt.set_device_mesh(small, device_mesh((6, 7), (2,), ("tp",)), styles={}),
        ),
        "weights outside": (
            small,
            lambda: smt.set_device_mesh(small, tp, device_mesh((6, 7), (2,), ("x",)), styles={}),
        ),
        "weights without tp": (
            small,
            lambda: smt.set_device_mesh(small, tp, mesh["dp"], styles={}),
        ),
        "no module": (small, lambda: smt.set_device_mesh(small[0].weight, tp, styles={})),  # type: ignore[arg-type]
        "no styles": (small, lambda: smt.set_device_mesh(small, tp, styles="column")),  # type: ignore[arg-type]
        "unknown": (small, lambda: smt.set_device_mesh(small, tp, styles={"0": "colum"})),  # type: ignore[dict-item]
        "no match": (
            small,
            lambda: smt.set_device_mesh(small, tp, styles={"1": "replicate", "*.q": "column"}),
        ),
        "no weight": (
            module,
            lambda: smt.set_device_mesh(module, tp, styles={"blocks.0": "column"}),
        ),
        "uneven": (
            small,
            lambda: smt.set_device_mesh(small, tp, styles={"1": "row_norm", "0": "column"}),
        ),
        "no dimension": (small, lambda: smt.set_device_mesh(small, tp, styles={"1": "row"})),
        "uneven part": (
            shared,
            lambda: smt.set_device_mesh(shared, tp, styles={"0": smt.Fused((3, 1))}),
        ),
        "not the sum": (
            shared,
            lambda: smt.set_device_mesh(shared, tp, styles={"0": smt.Fused((4, 2))}),
        ),
        "local sum": (
            shared,
            lambda: smt.set_device_mesh(shared, tp, styles={"0": smt.Fused((2, 2))}, local=True),
        ),
        "not so many": (
            shared,
            lambda: smt.set_device_mesh(shared, tp, styles={"0": smt.Fused(3)}),
        ),
        "shared": (
            shared,
            lambda: smt.set_device_mesh(shared, tp, styles={"0": "column", "1": "row"}),
        ),
        "shared parts": (
            shared,
            lambda: smt.set_device_mesh(shared, tp, styles={"0": "column", "1": smt.Fused(2)}),
        ),
        "gradient": (graded, lambda: smt.set_device_mesh(graded, tp, styles={})),
        "dtensors": (small, lambda: smt.set_device_mesh(small, tp, styles={})),
        "lazy": (small, lambda: smt.set_device_mesh(nn.LazyLinear(3), tp, styles={})),
        "amax first": (small, lambda: smt.amax(small)),
    }
    if what == "dtensors":
        from torch.distributed.tensor import distribute_module

        distribute_module(small, hybrid["tp"])
    given, act = calls[what]
    before = [(type(m), vars(m).keys()) for m in given.modules()], list(given.parameters())
    said = caught(act)
    after = [(type(m), vars(m).keys()) for m in given.modules()], list(given.parameters())
    return said, before[0] == after[0] and all(
        a is b for a, b in zip(before[1], after[1], strict=True)
    )


def refused_later(rank: int, what: str) -> Any:
    """What is said of a module that has its mesh."""
    mesh = mesh_like((4, 2))
    with torch.device("meta" if what == "meta" else "cpu"):
        module = nn.Sequential(nn.Linear(4, 4))
    smt.set_device_mesh(
        module, mesh["tp"], None if what == "tp alone" else mesh, styles={"0": smt.Fused(2)}
    )
    if what == "tp alone":
        sharded(module, mesh)
    if what == "replaced":
        module[0].weight = nn.Parameter(torch.zeros(4, 4))
    if what == "other shape":
        module[0].weight._local_tensor = torch.zeros(3, 4)
    acts: dict[str, Any] = {
        "twice": lambda: smt.set_device_mesh(module, mesh["tp"], styles={}),
        "inside": lambda: smt.set_device_mesh(
            nn.Sequential(nn.Linear(2, 2), module[0]), mesh["tp"], styles={}
        ),
        "other shape": lambda: smt.layout_of(module),
    }
    return caught(acts.get(what, lambda: smt.amax(module)))


def fused(components: Any) -> Any:
    """A Fused that is none."""
    return caught(lambda: smt.Fused(components))
