"""Prepares an exported program for coremltools: replacements, run-time checks, constants, names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, TensorArgument
from torch.fx import Node

from transformers_coreml.lowering import decompositions

aten = torch.ops.aten
LARGEST_HALF = 65504.0
MASKED = 4e4  # what takes the place of numbers that fp16 lacks; twice that is still added to scores without overflow
GROWN = 1 << 20  # elements of a constant that is larger than what it is computed from
FROM_FFT = ("aten.fft_", "aten._fft_")
RESIZES = {
    f"aten.{name}.{overload}"
    for name in ("_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa")
    for overload in ("default", "vec")
}
BOOLEAN = {
    getattr(aten, name).Tensor: getattr(aten, f"logical_{kind}").default
    for kind in ("and", "or", "xor")
    for name in (f"__{kind}__", f"bitwise_{kind}")
}


def prepared(program: ExportedProgram, frozen: Mapping[str, Any]) -> ExportedProgram:
    """Return a program that coremltools converts rightly.

    Args:
        program: what torch.export made.
        frozen: values of inputs that become constants, by the name of their placeholder.

    Raises:
        ValueError: the program holds only for some of the sizes that its inputs may have.
    """
    program = program.run_decompositions(decompositions())
    _rename_boolean_operators(program)
    known = _given(program, frozen)
    folded = _computed(program.graph_module.graph.nodes, known)
    _erase_checks(program, known)
    _fold(program, frozen, known, folded)
    _rewrite(program)
    program.graph_module.recompile()
    return program


def named(program: ExportedProgram, names: Mapping[str, str]) -> None:
    """Rename placeholders, given their new names by the present ones."""
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder" and names.get(node.name, node.name) != node.name:
            for spec in program.graph_signature.input_specs:
                if spec.arg.name == node.name:
                    spec.arg = TensorArgument(names[node.name])
            node.target = node.name = names[node.name]
    program.graph_module.recompile()


def run_time_inputs(program: ExportedProgram) -> list[str]:
    """Return the names of the placeholders of inputs that are no constants, in order."""
    return [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]


def within_half(program: ExportedProgram) -> None:
    """Bring finite constants into the range of fp16.

    A mask's smallest fp32 number would become -inf, and -inf times 0 is NaN.
    """

    def near(value: Any) -> Any:
        beyond = isinstance(value, float) and LARGEST_HALF < abs(value) < float("inf")
        return max(-MASKED, min(MASKED, value)) if beyond else value

    for node in program.graph_module.graph.nodes:
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, near)
    for tensors in (program.constants, program.state_dict):
        for name, value in tensors.items():
            if isinstance(value, Tensor) and value.is_floating_point() and bool((value.abs() > LARGEST_HALF).any()):
                tensors[name] = torch.where(value.isfinite(), value.clamp(-MASKED, MASKED), value)


def _rename_boolean_operators(program: ExportedProgram) -> None:
    """Call operators of Boolean tensors by the name that coremltools knows.

    They are no replacements: with symbolic shapes torch turns `logical_and` back into `bitwise_and`.
    """
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and node.target in BOOLEAN and node.meta["val"].dtype == torch.bool:
            node.target = BOOLEAN[node.target]


def _is_check(node: Node) -> bool:
    name = str(node.target)
    return node.op == "call_function" and not node.users and ("assert" in name or "sym_constrain" in name)


def _erase_checks(program: ExportedProgram, known: Mapping[Node, Any]) -> None:
    """Erase run-time checks, since Core ML has no such operation; a size that a check excludes is an error."""
    graph = program.graph_module.graph
    for node in reversed(list(graph.nodes)):
        if _is_check(node):
            if excluded := _excluded(node, known):
                raise ValueError(
                    f"the program holds only where {excluded}: torch.export took the branch of the sample's size. "
                    "Export fixed shapes, or state a `Dim` whose sizes take the same branch"
                )
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _excluded(check: Node, known: Mapping[Node, Any]) -> str:
    """Return the condition on sizes that a check demands and that doesn't follow from the stated ones, or ""."""
    for argument in check.all_input_nodes:
        value = known.get(argument, argument.meta.get("val"))
        if isinstance(value, torch.SymBool):
            bounds = value.node.shape_env.bound_sympy(value.node.expr)
            value = bounds.is_singleton() and bool(bounds.lower)
        if value is False:
            return str(getattr(argument.meta.get("val"), "node", argument))
    return ""


def _given(program: ExportedProgram, frozen: Mapping[str, Any]) -> dict[Node, Any]:
    """Return the values of placeholders that depend on no run-time input: parameters, buffers and frozen inputs."""
    signature, known = program.graph_signature, dict[Node, Any]()
    placeholders = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    changing = set(signature.buffers_to_mutate.values())
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        if isinstance(spec.arg, ConstantArgument):
            known[node] = spec.arg.value
        elif spec.kind == InputKind.USER_INPUT and node.name in frozen:
            known[node] = frozen[node.name]
        elif spec.kind != InputKind.USER_INPUT and spec.target is not None and spec.target not in changing:
            known[node] = program.state_dict.get(spec.target, program.constants.get(spec.target))
    return known


def _fold(program: ExportedProgram, frozen: Mapping[str, Any], known: Mapping[Node, Any], folded: set[Node]) -> None:
    """Put constants in the place of what was computed from known values."""
    graph, signature = program.graph_module.graph, program.graph_signature
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    _insert(program, {node: value for node, value in known.items() if node in folded or node.name in frozen}, folded)
    _insert_numbers(known, folded)
    graph.eliminate_dead_code()
    for spec in [*signature.input_specs]:
        former = placeholders.get(spec.arg.name)
        gone = isinstance(spec.arg, ConstantArgument) or spec.arg.name in frozen
        if former is not None and gone and not former.users:
            graph.erase_node(former)
            signature.input_specs.remove(spec)


def _computed(nodes: Iterable[Node], known: dict[Node, Any]) -> set[Node]:
    """Add to `known` the values of nodes that follow from it, and return these nodes."""
    computed = set()
    for node in nodes:
        needed = node.all_input_nodes
        random = "rand" in str(node.target)
        if node.op != "call_function" or random or _is_check(node) or any(one not in known for one in needed):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda one: known[one])
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        size = sum(known[one].numel() for one in needed if isinstance(known[one], Tensor))
        if isinstance(value, Tensor) and value.numel() > max(size, GROWN):
            continue
        known[node] = value
        computed.add(node)
    return computed


def _insert(program: ExportedProgram, values: Mapping[Node, Any], folded: set[Node]) -> None:
    """Give the users of computed tensors a constant in the tensor's place."""
    for node, value in values.items():
        users = [user for user in node.users if user not in folded]
        if users and isinstance(value, Tensor):
            tensor = value.detach().contiguous()
            constant = _constant(
                program, f"folded_{node.name}", tensor.float() if tensor.dtype == torch.float64 else tensor
            )
            constant.meta["val"] = node.meta["val"]
            for user in users:
                user.replace_input_with(node, constant)
            for spec in program.graph_signature.output_specs:
                if isinstance(spec.arg, TensorArgument) and spec.arg.name == node.name:
                    spec.arg = TensorArgument(constant.name)


def _insert_numbers(known: Mapping[Node, Any], folded: set[Node]) -> None:
    """Give the users of known numbers, texts and None these in place of a node."""
    for node, value in known.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            continue
        for user in [one for one in node.users if one not in folded]:
            plain = lambda one, node=node, value=value: value if one is node else one  # noqa: E731
            user.args, user.kwargs = torch.fx.map_arg((user.args, user.kwargs), plain)


def _constant(program: ExportedProgram, name: str, value: Tensor) -> Node:
    """Return a placeholder of a new constant."""
    graph = program.graph_module.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        lifted: Node = graph.create_node("placeholder", name)
    lifted.meta["val"] = value
    program.constants[lifted.name] = value
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(lifted.name), lifted.name, None)
    program.graph_signature.input_specs.insert(0, spec)
    return lifted


def _rewrite(program: ExportedProgram) -> None:
    """Rewrite nodes whose replacement torch would trace back to themselves."""
    for node in list(program.graph_module.graph.nodes):
        if node.op != "call_function":
            continue
        name = str(node.target)
        if name.startswith(FROM_FFT) and len(node.args) == 3:  # torch.export drops the default `norm`, ct wants it
            node.args = (*node.args, None)
        elif name in RESIZES and all(isinstance(size, int) for size in node.args[0].meta["val"].shape):
            _resize_by_matrices(program, node)
        elif node.target == aten.where.self:
            _widen_choice(program, node)


def _widen_choice(program: ExportedProgram, node: Node) -> None:
    """Expand the first of two scalars: coremltools would declare the result as a scalar, too."""
    condition, x, y = tuple[Any, ...](node.args)
    shapes = [one.meta["val"].shape for one in (condition, x, y)]  # type: ignore[union-attr]
    if x is not y and shapes[0] and not shapes[1] and not shapes[2]:
        with program.graph_module.graph.inserting_before(node):
            wide = program.graph_module.graph.call_function(aten.expand.default, (x, list(shapes[0])))
        wide.meta["val"] = x.meta["val"].expand(shapes[0])  # type: ignore[union-attr]
        node.args = (condition, wide, y)


def _resize_by_matrices(program: ExportedProgram, node: Node) -> None:
    """Write a separable resampling as a product with a matrix for each axis: what it makes of unit vectors.

    coremltools lacks the bicubic one, and computes the antialiased one as a plain one.
    """
    graph, arguments = program.graph_module.graph, tuple[Any, ...](node.args)
    x, _, corners, *scales = arguments
    (*_, height, width), (*outer, rows, columns) = x.meta["val"].shape, node.meta["val"].shape
    by_axis = (scales[0] if "vec" in str(node.target) else scales) or (None, None)
    operator = node.target.overloadpacket.default  # type: ignore[union-attr]

    def matrix(length: int, target: int, scale: float | None) -> Tensor:
        with torch.no_grad():
            resized: Tensor = operator(torch.eye(length)[None, None], [target, length], corners, scale, None)
        return resized[0, 0]

    down = _constant(program, f"{node.name}_rows", matrix(height, rows, by_axis[0]).contiguous())
    across = _constant(program, f"{node.name}_columns", matrix(width, columns, by_axis[1]).T.contiguous())
    with graph.inserting_before(node):
        tall = graph.call_function(aten.matmul.default, (down, x))
        tall.meta["val"] = torch.empty((*outer, rows, width), device="meta")
        wide = graph.call_function(aten.matmul.default, (tall, across))
    wide.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(wide)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument) and spec.arg.name == node.name:
            spec.arg = TensorArgument(wide.name)
    graph.erase_node(node)
