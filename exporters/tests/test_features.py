"""A package by one command: what is asked for, what is compared, and what is refused in a line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import limits
import pytest
import torch
from architectures import ALL
from transformers import WhisperConfig, WhisperModel
from transformers.exporters.base import ExportedModel
from transformers_coreml import export_model
from transformers_coreml.__main__ import main
from transformers_coreml.features import Compared, Input, cases, compare

MEL = "input_features=float:1x8x32:-1.5:1.5"
WIDTH = 32
SETTINGS = {
    "vocab_size": 64,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 16,
    "max_target_positions": 8,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic Whisper."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whisper")
    WhisperModel(WhisperConfig(**SETTINGS)).save_pretrained(folder)
    return folder


def run(checkpoint: Path, out: Path, *words: str, kind: str = "WhisperModel", part: str = "encoder") -> int:
    return main([str(checkpoint), str(out), "--class", kind, "--part", part, *words])


def test_an_encoder_becomes_a_package_that_equals_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(checkpoint, out, "--input", MEL) == 0
    said = json.loads((out / "comparison.json").read_text())
    assert (said["class"], said["part"], said["passed"]) == ("WhisperModel", "encoder", True)
    rows = [(row["inputs"], row["precision"]) for row in said["outputs"]]
    assert rows == [(case, precision) for precision in ("fp32", "fp16") for case in ("seeded", "least", "largest")]
    assert {row["output"] for row in said["outputs"]} == {"last_hidden_state"}
    printed = capsys.readouterr().out
    assert f"judge {out / 'model.mlpackage'} --range input_features=-1.5:1.5" in printed
    mel = torch.linspace(-1.5, 1.5, 8 * 32).reshape(1, 8, 32)
    with torch.no_grad():
        wanted = WhisperModel.from_pretrained(checkpoint).encoder(mel).last_hidden_state
    result = ExportedModel.from_pretrained(out)(input_features=mel).last_hidden_state
    limits.numbers_agree("the saved package", result, wanted, limits.sums("fp16", 1, limits.LAYER + limits.HEAD))
    assert run(checkpoint, out, "--input", MEL) == 2 and "is there already" in capsys.readouterr().err


def test_random_weights_need_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    assert run(tmp_path, tmp_path / "out", "--input", MEL, "--random-weights") == 0
    assert json.loads((tmp_path / "out/comparison.json").read_text())["weights"] == "random"


def test_an_error_over_the_bound_is_told_and_ends_with_1(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, tmp_path / "out", "--input", MEL, "--error", "1e-9") == 1
    assert "MORE THAN 1e-09" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/comparison.json").read_text())["passed"] is False


def test_another_program_is_found_at_an_edge_alone() -> None:
    """A clip within the domain: numbers from its middle agree, numbers at its edges do not."""

    class Scaled(torch.nn.Module):
        def __init__(self, most: float) -> None:
            super().__init__()
            self.most = most

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(max=self.most) * 2

    x = Input("x", "float", (2, 3), 0.0, 4.0)
    clipped = export_model(Scaled(3.99).eval(), {"x": x.drawn(0)}, precision="fp32")
    failed = [row.inputs for row in compare(Scaled(9.0), clipped, [x], "fp32", 1e-4) if not row.passed]
    assert failed == ["largest"]


def test_a_limit_holds_up_to_itself_and_for_no_nan() -> None:
    passed = [Compared("seeded", "y", "fp16", error, 0.01).passed for error in (0.0, 0.01, 0.0101, math.inf, math.nan)]
    assert passed == [True, True, False, False, False]


def test_cases_stay_within_the_domain_and_are_the_same_each_time() -> None:
    inputs = [Input("ids", "int", (2, 64), 3, 6), Input("x", "float", (4,), -2.0, -1.0)]
    for (name, arrays), (_, again) in zip(cases(inputs), cases(inputs), strict=True):
        for one in inputs:
            array = arrays[one.name]
            assert torch.equal(array, again[one.name]) and tuple(array.shape) == one.shape
            assert one.low <= array.min() and array.max() <= one.high
            assert name == "seeded" or len(array.unique()) == 1
        assert name != "seeded" or sorted(arrays["ids"].unique().tolist()) == [3, 4, 5, 6]


REFUSED = {
    "it lacks 22 weights of WhisperEncoder, conv1.bias first": {"kind": "WhisperEncoder", "part": ""},
    "has no model class WhispreModel; like it are WhisperModel": {"kind": "WhispreModel"},
    "WhisperModel has no part 'encode'; it has encoder, decoder": {"part": "encode"},
    "WhisperEncoder has no input a; it has input_features": {"input": "a=float:1:0:1"},
    "input input_features is missing, which WhisperEncoder needs": {"input": "attention_mask=int:1x32:1:1"},
    "input a: its type is 'bf16', must be float or int": {"input": "a=bf16:1:0:1"},
    "is no input; write NAME=TYPE:SIZES:LEAST:LARGEST": {"input": "input_features=float:1x8"},
    "its sizes are 1x0x32, must all be 1 or more": {"input": "input_features=float:1x0x32:0:1"},
    "its domain is 1 to 0, must be two numbers, least first": {"input": "input_features=float:1x8x32:1:0"},
    "its domain is 0 to inf, must be": {"input": "input_features=float:1x8x32:0:inf"},
    "can't compute with these inputs: ValueError: Whisper expects": {"input": "input_features=float:1x8x31:0:1"},
    "config.json can't be read": {"checkpoint": "nowhere"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_one_line(
    message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"kind": "WhisperModel", "part": "encoder", "input": MEL, "checkpoint": str(checkpoint), **REFUSED[message]}
    code = run(
        Path(asked["checkpoint"]), tmp_path / "o", "--input", asked["input"], kind=asked["kind"], part=asked["part"]
    )
    *_, line = capsys.readouterr().err.splitlines()  # after a bar of progress
    assert line.startswith("transformers_coreml: ")
    assert code == 2 and message in line and not (tmp_path / "o").exists()


def test_an_input_named_twice_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkpoint, tmp_path / "o", "--input", MEL, "--input", MEL) == 2
    assert "input input_features is named twice" in capsys.readouterr().err


def test_an_input_of_one_number_is_a_constant(tmp_path: Path) -> None:
    """A mask of ones: the program has no such input, and whoever passes one of zeros is told."""
    model, _ = ALL["bert"].build()
    model.save_pretrained(tmp_path / "bert")
    last = model.config.vocab_size - 1
    words = ("--input", f"input_ids=int:1x16:0:{last}", "--input", "attention_mask=int:1x16:1:1")
    assert run(tmp_path / "bert", tmp_path / "out", *words, kind="BertModel", part="") == 0
    exported = ExportedModel.from_pretrained(tmp_path / "out")
    assert [one.name for one in exported.program.get_spec().description.input] == ["input_ids"]
    ids = torch.zeros(1, 16, dtype=torch.long)
    with pytest.raises(ValueError, match="attention_mask is .* in this program"):
        exported(input_ids=ids, attention_mask=ids)
