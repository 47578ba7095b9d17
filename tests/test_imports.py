"""A process of ours imports of coremltools what it needs; what was spared is there as soon as it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys

SAID = """
import json, sys
from shardmill import cli

cli.app = lambda: None
cli.main()
import coremltools

def loaded():
    return [name in sys.modules for name in ("transformers", "torch.distributed.fsdp")]

found = [loaded()]
from coremltools.optimize.torch.layerwise_compression.algorithms import GPTQ
found += [loaded(), GPTQ.__module__.split(".")[-1], coremltools.optimize.torch.__name__.split(".")[-1]]
from transformers import Phi3Config
from transformers.models.phi3 import modeling_phi3
found += [Phi3Config.model_type, loaded(), "accelerate" in sys.modules]
import accelerate
print(json.dumps(found))
"""


def test_a_command_imports_what_it_needs_and_no_more() -> None:
    done = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True, check=True)
    spared, used, gptq, trainers, family, all_of_them, more = json.loads(done.stdout)
    assert (spared, used, all_of_them) == ([False, False], [False, True], [True, True])
    assert (gptq, trainers, family) == ("algorithms", "torch", "phi3")
    assert not more
