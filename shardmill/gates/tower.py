"""Parity of a tower's program: rows for made-up images or sounds, against transformers', on the three questions.

Whether a row is right shows in fp32 alone: another epsilon or another kind of GELU moves a row by less than rounding to
fp16 does. So transformers computes with the package's weights, and the program in fp32. Images do not fill the bucket
and are not square where the tower takes such, and one of them is faint: where its patches meet the table of positions,
almost nothing is left, so that the epsilons of norms count. A sound's last chunk is cut, and a faint sound is one whose
convolutions the positions, which are the host's, almost undo.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit_runner.figures import relative_error
from torch import Tensor, nn
from torch.nn.functional import conv2d, cosine_similarity, gelu, pad

from shardmill.gates.measurement import Measurement
from shardmill.gates.naming import Weights, loading
from shardmill.gates.nonfinite import explained
from shardmill.gates.reference import checkpoint_origins, checkpoint_weights, return_heap
from shardmill.gates.replacements import without_weights
from shardmill.gates.stored import StoredWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.hf_config import load_whole_config
from shardmill.models.part_kinds import inputs, interface
from shardmill.models.tower import COLOURS, CONVOLUTIONS, TABLE
from shardmill.plan import Part
from shardmill.runtime.expected import grids, made_columns
from shardmill.runtime.kv import Floats
from shardmill.runtime.program import Program, reused
from shardmill.runtime.tower import Grid, laid, places, tokens_of, tower_arrays

KIND = "AutoModelForMultimodalLM"
FAINT, FAINTNESS = "faint", 0.1  # an image, and what is left of its patches in shares of what the table gives
LOUD = 10.0  # noise in what fills a bucket up


class TowerReference:
    """Transformers' modules that make rows of images or sounds, without weights until they run."""

    def __init__(self, source: Path) -> None:
        """Build the model on the meta device; `source` is the checkpoint's folder."""
        import transformers

        config = load_whole_config(source)
        options = {"attn_implementation": "eager", "dtype": torch.float32}
        with without_weights():
            model = getattr(transformers, KIND).from_config(config, **options)
        self.model = model.model.eval()
        self.origins = checkpoint_origins(model, source)
        decoder = self.model.get_decoder()
        self.modules = {f"model.{n}.": each for n, each in self.model.named_children() if each is not decoder}
        self.tower = nn.ModuleList(self.modules.values())
        if hearing := getattr(self.model, "audio_tower", None):  # whose positions are in no checkpoint
            self.waves = hearing.positional_embedding
            self.waves.positional_embedding = self.waves.compute_default_singular_positional_embedding()

    @torch.no_grad()
    def rows(
        self,
        columns: Floats,
        grid: Grid,
        rules: Mapping[str, Any],
        weights: Weights,
        positions: Floats | None = None,
    ) -> Tensor:
        """Return the rows of an image or of a window of a sound, [rows, d].

        Args:
            columns: see `tower_arrays`.
            grid: see `tower_arrays`.
            rules: model.json's `tower`.
            weights: returns the tower's tensors by name.
            positions: of a sound's chunk, [1, channels, 1, rows], instead of transformers' own.
        """
        if "chunk" in rules:
            return self._heard(torch.from_numpy(columns), rules, weights, positions)
        with loading(self.modules, self.origins, weights, return_heap):
            pixels = self._arguments(torch.from_numpy(columns), grid, rules)
            features: Any = self.model.get_image_features(**pixels, return_dict=True).pooler_output
        whole: Tensor = features if isinstance(features, Tensor) else torch.cat([*features])
        return whole.reshape(-1, whole.shape[-1])

    def _heard(self, frames: Tensor, rules: Mapping[str, Any], weights: Weights, positions: Floats | None) -> Tensor:
        """Return the rows of a window, as `rows` does; whole chunks of frames come with a mask of what is there."""
        count, usual = frames.shape[1], self.waves.positional_embedding
        filled = pad(frames, (0, -count % rules["chunk"]))[None]
        present = (torch.arange(filled.shape[2]) < count).long()[None]
        if positions is not None:
            self.waves.positional_embedding = torch.from_numpy(positions[0, :, 0].T.copy())
        try:
            with loading(self.modules, self.origins, weights, return_heap):
                result: Tensor = self.model.get_audio_features(filled, present, return_dict=True).pooler_output
        finally:
            self.waves.positional_embedding = usual
        return result

    def _arguments(self, columns: Tensor, grid: Grid, rules: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the arguments of `get_image_features`, by whether it takes patches or pixels."""
        by_colour = columns.T.reshape(len(columns.T), COLOURS, 1, -1)  # [n, 3, 1, P * P]
        taken = inspect.signature(self.model.get_image_features).parameters
        if "image_grid_thw" in taken:
            flat = by_colour.expand(-1, -1, rules["frames"], -1).flatten(1)
            return {"pixel_values": flat, "image_grid_thw": torch.tensor([[1, *grid]])}
        patch = rules["patch"]
        at = torch.from_numpy(places(grid, rules["merge"]))
        pixels = torch.empty(*grid, COLOURS, patch, patch)
        pixels[at[:, 0], at[:, 1]] = by_colour.reshape(-1, COLOURS, patch, patch)
        if "spatial_shapes" in taken:  # patches row by row, a pixel's colours side by side
            flat = pixels.permute(0, 1, 3, 4, 2).reshape(1, len(at), -1)
            whole = torch.ones(1, len(at), dtype=torch.int32)
            return {"pixel_values": flat, "spatial_shapes": torch.tensor([[*grid]]), "pixel_attention_mask": whole}
        image = pixels.permute(2, 0, 3, 1, 4).reshape(1, 1, COLOURS, grid[0] * patch, grid[1] * patch)
        return {"pixel_values": image}


@dataclass(frozen=True)
class Image:
    """A made-up image: its patches' columns [colours * patch * patch, h * w], and its grid.

    Or a made-up window of a sound: its frames [bins, frames], and for a faint one the positions of a chunk.
    """

    name: str
    columns: Floats
    grid: Grid
    positions: Floats | None = None


def images(part: Part, rules: Mapping[str, Any], stored: StoredWeights) -> Iterator[Image]:
    """Yield the images on which a bucket's program is compared."""
    x, made = [int(extent) for extent in inputs(part.spec)["x"]], list[Image]()
    for number, grid in enumerate(grids(part.spec.tokens, rules)):
        made.append(Image(f"{grid[0]} x {grid[1]}", made_columns(x, number, 0, grid, rules), grid))
    yield from made
    if "chunk" in rules:
        yield faint_sound(part, rules, stored)
        return
    yield Image(FAINT, faint(part, rules, stored, made[0]), made[0].grid)


def faint(part: Part, rules: Mapping[str, Any], stored: StoredWeights, like: Image) -> Floats:
    """Return columns that take away from what the table of positions and the bias give, as far as columns can.

    What is left has the size of FAINTNESS times that sum. Numbers are exact in fp16.
    """
    weight, count = stored.values("patch.weight"), len(like.columns.T)
    pixels = np.eye(len(like.columns), dtype=np.float32)
    kernel = weight.reshape(len(weight), -1).double() @ torch.from_numpy(laid(pixels, rules)).double()
    before = torch.zeros(len(weight), count, dtype=torch.float64)
    if "patch.bias" in part.shapes:
        before += stored.values("patch.bias").flatten()[:, None].double()
    if TABLE in part.shapes:
        taken = tower_arrays(rules, count, like.columns, like.grid)["positions"][0, :, :, 0]
        before += stored.values(TABLE).reshape(len(weight), -1).double() @ torch.from_numpy(taken).double()
    spread = torch.randn(before.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = FAINTNESS * before.square().mean().sqrt() * spread - before
    square = kernel @ kernel.T
    square += 1e-6 * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    columns = kernel.T @ torch.linalg.solve(square, wanted)
    exact: Floats = columns.clamp(-1e4, 1e4).half().float().numpy()
    return exact


def faint_sound(part: Part, rules: Mapping[str, Any], stored: StoredWeights) -> Image:
    """Return a sound of equal chunks, and positions that leave FAINTNESS of what the convolutions make of a chunk."""
    assert part.spec.tower is not None and part.spec.tower.convolutions is not None
    sound, x = part.spec.tower.convolutions, [int(extent) for extent in inputs(part.spec)["x"]]
    frames = made_columns(x, len(FAINT), 0, (1, sound.frames), rules)
    made = torch.from_numpy(frames)[None, None].double()
    for name in CONVOLUTIONS:
        kernel = stored.values(f"{name}.weight").double().reshape(sound.channels, -1, 3, 3)
        bias = stored.values(f"{name}.bias").double().flatten()
        made = gelu(conv2d(made, kernel, bias, 2, 1))
    made = conv2d(made, stored.values("patch.weight").double().reshape(-1, sound.channels, sound.height, 1))
    spread = torch.randn(made.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = FAINTNESS * made.square().mean().sqrt() * spread - made
    chunks = part.spec.tokens // sound.tokens
    return Image(FAINT, np.tile(frames, chunks), (1, chunks * sound.frames), positions.float().numpy())


def tower_parity(
    program: Path, part: Part, rules: Mapping[str, Any], source: Path, stored: StoredWeights
) -> Iterator[Measurement]:
    """Yield all measurements of a tower's program; rounding.py measures its weights.

    Args:
        program: the compiled bundle.
        part: the part that was converted to the program.
        rules: plan.json's `tower`.
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    reference, loaded = TowerReference(source), reused(lambda: Program(program, interface(part.spec)))
    made, original = [*images(part, rules, stored)], checkpoint_weights(source)
    with load_programs_as("fp32"):
        for image in made:
            expected = reference.rows(image.columns, image.grid, rules, stored, image.positions).numpy()
            if is_portable():
                again = partial(_run, loaded, part, rules, image)
                name = "faint_error" if image.name == FAINT else "tower_error"
                yield explained(Measurement(name, relative_error(again(), expected), image.name), again, program)
        yield _padding(loaded, part, rules, made[0], program)
    with load_programs_as("fp16"):
        for image in made[:-1]:  # nothing is left of the faint one in fp16
            again = partial(_run, loaded, part, rules, image)
            shipped = torch.from_numpy(again())
            for name, weights in (("tower_cosine_fp16", stored), ("tower_cosine", original)):
                truth = reference.rows(image.columns, image.grid, rules, weights)
                worst = float(cosine_similarity(shipped.double(), truth.double(), dim=1).min())
                yield explained(Measurement(name, worst, image.name), again, program)


def _run(
    loaded: Callable[[], Program], part: Part, rules: Mapping[str, Any], image: Image, noise: float = 0.0
) -> Floats:
    """Return the program's rows for an image, [rows, d]; noise fills the bucket up in place of zeros.

    A sound's last chunk is filled up with silence, as transformers does; noise is in the chunks after it.
    """
    arrays, count = tower_arrays(rules, part.spec.tokens, image.columns, image.grid), tokens_of(rules, image.grid)
    arrays |= {} if image.positions is None else {"positions": image.positions}
    generator = np.random.default_rng(0)
    after = {name: arrays[name][:, :, count:] for name in ("x", "positions") if name in arrays}
    if "chunk" in rules:
        after = {"x": arrays["x"][-(-count // rules["rows"]) :]}
    for rest in after.values() if noise else ():
        rest[:] = noise * generator.standard_normal(rest.shape)
    hidden = loaded()(arrays)
    outputs: Floats = np.ascontiguousarray(hidden[0, :, : count // rules["merge"] ** 2, 0].T)
    return outputs


def _padding(
    loaded: Callable[[], Program], part: Part, rules: Mapping[str, Any], image: Image, program: Path
) -> Measurement:
    """Measure what noise in place of zeros changes after an image that does not fill the bucket."""
    again = partial(_run, loaded, part, rules, image, LOUD)
    plain = _run(loaded, part, rules, image)
    return explained(Measurement("padding_error", relative_error(again(), plain), image.name), again, program)
