"""Graph passes that coremltools lacks; importing this module registers them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import register_pass

WHOLE_STATE_UPDATE = "shardmill::whole_state_update"


@register_pass(namespace="shardmill")
class whole_state_update(AbstractGraphPass):  # type: ignore[misc]
    """Assigning a whole buffer needs no slice_update, which the Neural Engine takes in few patterns only (ST3, ST4).

    Given:
        %a = slice_update(x=%cache, update=%new, begin=0.., end=shape)
        %b = coreml_update_state(state=%state, value=%a)
    Result:
        %b = coreml_update_state(state=%state, value=%new)
    """

    def apply(self, prog: Any) -> None:
        for function in prog.functions.values():
            for op in list(function.operations):
                if op.op_type == "slice_update" and _covers_everything(op):
                    function.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=op.update)
                    function.remove_ops([op])


def _covers_everything(op: Any) -> bool:
    """Whether a slice_update replaces all of x."""
    if op.begin.val is None or op.end.val is None or tuple(op.update.shape) != tuple(op.x.shape):
        return False
    rank = len(op.x.shape)

    def axes(var: Any, default: Any) -> Any:
        return np.full(rank, default) if var is None or var.val is None else np.asarray(var.val)

    starts = axes(op.begin_mask, False) | (op.begin.val == 0)
    ends = axes(op.end_mask, False) | (op.end.val >= np.asarray(op.x.shape))
    plain = (axes(op.stride, 1) == 1) & ~axes(op.squeeze_mask, False).astype(bool)
    return bool((starts & ends & plain).all())


logging.getLogger("coremltools").setLevel(logging.ERROR)
