"""Pipeline schedules drawn as text and as a picture, and the command that draws them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from megascale_trainer.commands.pipeline import app
from megascale_trainer.parallel.pipeline.drawing import (
    Durations,
    Timeline,
    as_svg,
    as_text,
    simulate,
)
from megascale_trainer.parallel.pipeline.schedule import PipelineShape, one_forward_one_backward

SVG = "{http://www.w3.org/2000/svg}"
PLAIN = """\
        0         5         10
stage 0 0 1 2 . . . . [0 ]. [1 ]. [2 ]
stage 1 . 0 1 . . [0 ]2 [1 ]. [2 ]. .
stage 2 . . 0 [0 ]1 [1 ]2 [2 ]. . . ."""
ZERO_BUBBLE = """\
        0              5              10
stage 0 0  1  2  .  .  [0   ][1   ][2   ]
stage 1 .  0  1  .  [0]2  [1]<0>[2]<1><2>
stage 2 .  .  0  [0]1  [1]2  [2]<0><1><2>"""
INTERLEAVED = """\
        0              5              10
stage 0 0a 1a 0b 1b .  .  [0b  ].  [1b  ][0a  ][1a  ]
stage 1 .  0a 1a 0b [0b  ]1b [1b  ][0a  ][1a  ].  ."""


def _timeline(
    stages: int, micro_batches: int, chunks: int = 1, durations: Durations | None = None
) -> Timeline:
    programs = [
        one_forward_one_backward(PipelineShape(stage, stages, micro_batches, chunks))
        for stage in range(stages)
    ]
    return simulate(programs, durations or Durations())


def _draw(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["draw", *arguments], env={"COLUMNS": "120"})


def test_schedules_as_text() -> None:
    assert as_text(_timeline(3, 3)) == PLAIN
    assert as_text(_timeline(2, 2, 2)) == INTERLEAVED


@given(
    rounds=st.integers(1, 6),
    chunks=st.integers(1, 3),
    forward=st.integers(1, 3),
    backward=st.integers(1, 4),
    width=st.integers(1, 200),
)
def test_blocks_are_parts_of_one_drawing(
    rounds: int, chunks: int, forward: int, backward: int, width: int
) -> None:
    timeline = _timeline(3, 3 * rounds, chunks, Durations(forward, backward, 1))
    [whole] = as_text(timeline, 100_000).split("\n\n")
    blocks = [block.splitlines() for block in as_text(timeline, width).split("\n\n")]
    for stage, line in enumerate(whole.splitlines()[1:]):
        parts = [lines[1 + stage].removeprefix(f"stage {stage}") for lines in blocks]
        joined = line.removeprefix(f"stage {stage}").replace(" ", "")
        assert "".join(parts).replace(" ", "") == joined
        assert line.count("[") == line.count("]") == 3 * rounds * chunks


@given(stages=st.integers(1, 6), rounds=st.integers(1, 4), chunks=st.integers(1, 3))
def test_the_bubble_without_transfers_is_that_of_the_formula(
    stages: int, rounds: int, chunks: int
) -> None:
    """Narayanan et al., arXiv 2104.04473, section 2.2."""
    chunks, number = chunks if stages > 1 else 1, stages * rounds
    bubble = (stages - 1) / (chunks * number)
    assert _timeline(stages, number, chunks).bubble_share == pytest.approx(bubble / (1 + bubble))


def test_a_picture_shows_every_computation_once_in_its_place() -> None:
    timeline = _timeline(4, 8, 2, Durations(1, 2, 1))
    picture = ElementTree.fromstring(as_svg(timeline, "a title"))
    width, height = int(picture.attrib["width"]), int(picture.attrib["height"])
    boxes = [
        box.attrib for box in picture.iter(f"{SVG}rect") if box.attrib.get("stroke") == "white"
    ]
    assert len(boxes) == 4 * 8 * 2 * 2
    colours = Counter(box["fill"] for box in boxes)
    assert sorted(colours.values()) == [32] * 4, "chunk 0 and 1, forward and backward"
    rows: dict[int, list[tuple[int, int]]] = {}
    for box in boxes:
        rows.setdefault(int(box["y"]), []).append(
            (int(box["x"]), int(box["x"]) + int(box["width"]))
        )
    assert len(rows) == 4 and max(rows) < height
    for row in rows.values():
        row.sort()
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(row)) and row[-1][1] <= width
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"a title", "stage 3", "time units", "chunk 1 backward", "idle"} <= {*texts}
    assert any(text and f"bubble {timeline.bubble_share:.1%}" in text for text in texts)


def test_the_command_draws_and_prints_the_size_of_the_bubble(tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    drawn = _draw("--stages", "3", "--micro-batches", "3", "--svg", str(picture))
    assert drawn.exit_code == 0
    assert PLAIN in drawn.output
    assert "makespan 15 units; bubble: 40.0% of the stages' time" in drawn.output
    assert "1F1B: 3 stages, 3 micro-batches, plain receives" in picture.read_text()


def test_split_backwards_are_drawn_with_their_weight_gradients(tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    shape = ("--stages", "3", "--micro-batches", "3", "--schedule", "zero_bubble")
    drawn = _draw(*shape, "--svg", str(picture))
    assert ZERO_BUBBLE in drawn.output
    assert "2 backward (1 for weights)" in drawn.output
    assert "makespan 11 units; bubble: 18.2% of the stages' time" in drawn.output
    texts = {text.text for text in ElementTree.fromstring(picture.read_text()).iter(f"{SVG}text")}
    assert {"forward", "backward", "backward input", "backward weight", "idle"} <= texts


def test_overlap_hides_transfers_and_json_has_the_timeline() -> None:
    shape = (
        *("--stages", "2", "--micro-batches", "8", "--virtual-stages", "2"),
        *("--transfer", "1", "--json"),
    )
    found = [json.loads(_draw(*shape, *more).output) for more in ((), ("--overlap",))]
    assert found[1]["makespan"] == 57 < found[0]["makespan"]
    assert found[1]["bubble_share"] < found[0]["bubble_share"]
    first = found[1]["stages"][1][0]
    assert first == {"kind": "forward", "micro_batch": 0, "chunk": 0, "start": 2, "end": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--micro-batches", "6", "--virtual-stages", "2"),
            "micro-batches in multiples of the stages",
        ),
        (("--stages", "1", "--virtual-stages", "2"), "more than one stage"),
        (("--svg", "/no/such/folder/a.svg"), "No such file or directory"),
        (("--stages", "0"), "--stages"),
        (
            ("--schedule", "zero_bubble", "--backward-weight", "2"),
            "--backward-weight 2 leaves nothing of --backward 2",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: tuple[str, ...], words: str) -> None:
    refused = _draw(*arguments)
    assert refused.exit_code == 2
    assert words in refused.output


def test_drawing_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from megascale_trainer.commands.pipeline import app; app(['draw'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "bubble" in done.stdout
