"""Checkpoints: bits come back; torn ones are never loaded; a failed write leaves the old ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from isomodel import contract as contracts
from isomodel.numerics import Numerics
from tests.trainer import tiny
from trainer.checkpoint import COMMIT, FACTS, CheckpointError, CheckpointStore, fault, load_arrays


@pytest.fixture(scope="module")
def contract():
    step = tiny.step()
    return contracts.derive(tiny.CONFIG, Numerics(), step.traces(tiny.BUCKET))


@pytest.fixture(scope="module")
def state():
    full = tiny.state(tiny.step())
    return {"masters": full.masters, "optimizer": full.optimizer}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_everything_comes_back_to_the_bit(store, state, contract):
    # NaN payloads, denormals and -0.0 are bits too.
    odd = np.array([0x7FC01234, 0x00000001, 0x80000000, 0xFF800000], np.uint32).view(np.float32)
    saved = state | {"odd": jax.numpy.asarray(odd)}
    store.save(10, saved, {"updates": 20, "note": "x"}, contract)
    found, torn = store.latest()
    assert (found.step, torn) == (10, {})
    assert found.facts == {"updates": 20, "note": "x", "step": 10}
    assert found.contract == contract
    back = load_arrays(found, abstract(saved))
    assert jax.tree.structure(back) == jax.tree.structure(saved)
    assert bits(back) == bits(saved)


def test_the_newest_are_kept_and_nothing_else_stays(store, state, contract):
    for step in (1, 2, 3, 10):
        store.save(step, state, {}, contract)
    assert store.steps() == [3, 10]
    assert sorted(p.name for p in store.folder.iterdir()) == ["step_00000003", "step_00000010"]
    before = {p: p.stat().st_mtime_ns for p in store.path(10).rglob("*")}
    store.save(10, state, {}, contract)  # an intact one of this step is left alone
    assert before == {p: p.stat().st_mtime_ns for p in store.path(10).rglob("*")}


def tear_missing_commit(path):
    (path / COMMIT).unlink()


def tear_cut_commit(path):
    text = (path / COMMIT).read_text()
    (path / COMMIT).write_text(text[: len(text) // 2])


def tear_forged_commit(path):
    commit = json.loads((path / COMMIT).read_text())
    del commit["files"][FACTS]
    (path / COMMIT).write_text(json.dumps(commit))


def tear_truncated_array(path):
    largest = max((p for p in (path / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as f:
        f.truncate(largest.stat().st_size - 1)


def tear_flipped_bit(path):
    largest = max((p for p in (path / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def tear_missing_arrays(path):
    shutil.rmtree(path / "state")


TEARS = [
    (tear_missing_commit, "has no COMMIT"),
    (tear_cut_commit, "COMMIT cannot be read"),
    (tear_forged_commit, "was changed"),
    (tear_truncated_array, "bytes, and was written with"),
    (tear_flipped_bit, "was changed"),
    (tear_missing_arrays, "is missing"),
]


@pytest.mark.parametrize(("tear", "reason"), TEARS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(store, state, contract, tear, reason):
    store.save(1, state, {}, contract)
    store.save(2, state, {}, contract)
    tear(store.path(2))
    found, torn = store.latest()
    assert found.step == 1 and reason in torn[2]
    # When the run reaches that step again, the torn folder gives way.
    store.save(2, state, {}, contract)
    found, torn = store.latest()
    assert (found.step, torn) == (2, {})


def test_no_intact_checkpoint_is_none(store, state, contract):
    assert store.latest() == (None, {})
    store.save(1, state, {}, contract)
    tear_flipped_bit(store.path(1))
    found, torn = store.latest()
    assert found is None and list(torn) == [1]


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_swept(store, state, contract):
    store.save(1, state, {}, contract)
    leftover = store.folder / ".step_00000002.tmp-0badcafe"
    shutil.copytree(store.path(1), leftover)
    assert store.latest()[0].step == 1
    other = store.folder / ".step_notes"
    other.mkdir()
    store.sweep()
    assert not leftover.exists() and other.exists()


WRITER = textwrap.dedent(
    """
    import resource, signal, sys
    import isomodel
    import numpy as np
    from isomodel import contract as contracts
    from trainer.checkpoint import CheckpointError, CheckpointStore
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = CheckpointStore(sys.argv[1], keep=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        store.save(2, {"w": np.random.default_rng(0).normal(size=100_000)}, {}, contracts.Contract.load(sys.argv[2]))
    except CheckpointError as e:
        print("REFUSED", e)
    """
)


def test_a_write_that_fails_is_said_and_leaves_the_old_ones(store, state, contract, tmp_path):
    """A file that may not grow stands for a full disk: the system refuses the write in the same place."""
    store.save(1, state, {}, contract)
    before = {p: p.stat().st_mtime_ns for p in store.folder.rglob("*")}
    contract.save(tmp_path / "contract.json")
    run = subprocess.run(
        [sys.executable, "-c", WRITER, store.folder, tmp_path / "contract.json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "REFUSED step 2 could not be saved" in run.stdout
    assert "File too large; free some space" in run.stdout
    assert "still there: 1" in run.stdout
    assert {p: p.stat().st_mtime_ns for p in store.folder.rglob("*") if p != store.folder} == {
        p: t for p, t in before.items() if p != store.folder
    }
    assert store.latest()[0].step == 1


def test_a_full_disk_is_said_and_leaves_the_old_ones(contract, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", disk], check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        store = CheckpointStore(disk / "checkpoints", keep=9)
        state = {"w": np.random.default_rng(0).normal(size=50_000)}
        full = 0
        for step in range(1, 9):
            try:
                store.save(step, state, {}, contract)
            except CheckpointError as e:
                assert "No space left on device: it needs 400,000 bytes, and" in str(e)
                assert "are free; free some space" in str(e)
                full = step
                break
        assert full > 1, "the disk was never full"
        assert store.latest()[0].step == full - 1
        assert not [p for p in store.folder.iterdir() if p.name.startswith(".")]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_cannot_be_written_is_said(store, state, contract):
    store.folder.parent.mkdir(exist_ok=True)
    store.folder.write_text("a file in the way")
    with pytest.raises(CheckpointError, match="step 1 could not be saved"):
        store.save(1, state, {}, contract)


def test_arrays_of_another_model_are_refused(store, state, contract):
    store.save(1, state, {}, contract)
    found, _ = store.latest()
    wrong = abstract(state)
    wrong["masters"]["embed"] = jax.ShapeDtypeStruct((33, 64), np.float32)
    del wrong["masters"]["final_norm"]
    with pytest.raises(CheckpointError, match="does not hold the state of this model") as e:
        load_arrays(found, wrong)
    assert "['masters']['embed'] is float32[32, 64], expected float32[33, 64]" in str(e.value)
    assert "['masters']['final_norm'] is float32[64], expected none" in str(e.value)


LOOP = textwrap.dedent(
    """
    import sys
    import isomodel
    import numpy as np
    from isomodel import contract as contracts
    from trainer.checkpoint import CheckpointStore
    store, contract = CheckpointStore(sys.argv[1], keep=2), contracts.Contract.load(sys.argv[2])
    for step in range(1, 10**6):
        store.save(step, {"w": (np.arange(50_000) + step).astype(np.int32)}, {"of": step}, contract)
        print(step, flush=True)
    """
)


def test_a_writer_killed_at_random_moments_always_leaves_an_intact_checkpoint(store, contract, tmp_path):
    contract.save(tmp_path / "contract.json")
    rng = np.random.default_rng(0)
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", LOOP, store.folder, tmp_path / "contract.json"], stdout=subprocess.PIPE, text=True
        )
        shutil.rmtree(store.folder, ignore_errors=True)
        confirmed = 0
        while confirmed < 2:
            confirmed = int(writer.stdout.readline())
        signal.sigtimedwait([], float(rng.uniform(0, 0.2)))
        writer.kill()
        confirmed = max([confirmed, *map(int, writer.stdout.read().split())])
        writer.wait()
        found, _ = store.latest()
        assert found.step >= confirmed
        back = load_arrays(found, {"w": jax.ShapeDtypeStruct((50_000,), np.int32)})
        assert (np.asarray(back["w"]) == found.step + np.arange(50_000)).all() and found.facts["of"] == found.step
        assert fault(found.path) is None
