"""The steps of one run: saving in the background, keeping a few, restoring the newest sound one.

A folder named by a number is complete. Others are no steps: `30.saving` (in flight or killed), `10.deleting`,
and `30.aside1`, which was broken or newer than the step that a run went back to.
"""

import itertools
import json
import logging
import threading

import jax
import orbax.checkpoint as ocp
from etils import epath

from siamese_jax.checkpoint import arrays as bits
from siamese_jax.checkpoint import seal as seals
from siamese_jax.checkpoint.processes import barrier, together, vote
from siamese_jax.checkpoint.seal import Broken, one_line, spell
from siamese_jax.errors import FaultError, InputError

LOG = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, as a context manager. The first save makes and tidies `folder`, not before.

    Kept are the newest `keep` and every multiple of `keep_every` (0: none). With `strict`, restoring ends
    at a broken checkpoint instead of passing it. `log` takes one line and is called on process 0 only.
    """

    def __init__(self, folder, *, keep=3, keep_every=0, strict=False, log=LOG.warning):
        if keep < 1 or keep_every < 0:
            raise InputError(f"checkpoint.keep={keep} must be 1 or more, keep_every={keep_every} 0 or more")
        seals.quiet_orbax()
        self.folder = epath.Path(folder).absolute()
        self._keep, self._keep_every, self._strict, self._log = keep, keep_every, strict, log
        self._writer = self._thread = self._failure = self._restored = None
        self._is_prepared = False

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.close()
        except FaultError as fault:
            if error is None:
                raise
            self._say(str(fault))

    def save(self, step, state, about):
        """Starts to save `state`, any tree of jax arrays, which may be donated after; False if `step` exists.

        `about` is a dict that JSON can hold. FaultError tells of this save or of the one before it.
        """
        self.wait()
        about = json.loads(json.dumps(about))
        named = bits.named(state)
        try:
            self._prepare()
            if vote("exists" if step in self.steps() else None):
                return False
            table = {name: bits.entry(array) for name, array in named.items()}
            words = {name: bits.words(array) for name, array in named.items()}
            sums = bits.bit_sums(words)
            self._writer.save(self.folder / f"{step}.saving", args=ocp.args.PyTreeSave(words))
        except Exception as fault:
            self._failure = f"checkpoint {step} could not be saved", fault
            self._raise_failure()
        self._thread = threading.Thread(target=self._finish, args=(step, about, table, sums))
        self._thread.start()
        return True

    def check(self):
        """FaultError if a save has failed by now. Costs nothing: to be asked at every training step."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self):
        """Waits for the save in flight; FaultError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def close(self):
        """Waits for the save in flight, FaultError if it failed, and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._writer, self._is_prepared = None, False

    def steps(self):
        """The complete checkpoints, oldest first."""
        return seals.available_steps(self.folder)

    def restore(self, target, step=None, *, partial=False):
        """The newest sound checkpoint, or that of `step`, as (step, state, about); None if there are none.

        `target` is the tree to fill, of arrays or ShapeDtypeStructs; an array goes where its sharding says
        (without one, to the first device). With `partial`, stored arrays may be left out. A target that does
        not fit is an InputError. A broken checkpoint is named through `log` and the one before it taken; with
        `strict`, with `step` given, and when none is sound, it is an InputError.
        """
        self.wait()
        steps = self.steps()
        if step is not None and step not in steps:
            raise InputError(f"there is no checkpoint {step} in {self.folder}; there are: {spell(steps)}")
        broken = {}
        for candidate in [step] if step is not None else reversed(steps):
            try:
                state, about = self._read(candidate, target, partial)
            except Broken as fault:
                broken[candidate] = str(fault)
            if candidate not in broken:
                self._restored, self._is_prepared = candidate, False
                for lost, reason in broken.items():
                    self._say(
                        f"checkpoint {lost} is broken ({reason}); going back to {candidate}: "
                        f"steps {candidate + 1} to {lost} are lost"
                    )
                return candidate, state, about
            if self._strict or step is not None:
                others = spell(other for other in steps if other != candidate)
                raise InputError(
                    f"checkpoint {candidate} in {self.folder} is broken ({broken[candidate]}); not tried: {others}"
                )
        if broken:
            reasons = "; ".join(f"{lost}: {reason}" for lost, reason in broken.items())
            raise InputError(
                f"no checkpoint in {self.folder} is sound ({reasons}); to start from scratch, use another folder"
            )
        return None

    def _read(self, step, target, partial):
        """(state, about) of one checkpoint, or Broken, or InputError: the same on all processes."""
        folder, wanted = self.folder / str(step), bits.named(target)
        seal = together(lambda: seals.verified(folder))
        table = seal["arrays"]
        bits.compare(step, wanted, table, partial)
        words = together(lambda: bits.load(folder, wanted))
        together(lambda: bits.compare_sums(words, table))
        leaves = [bits.unwords(words[name], table[name]) for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(target), leaves), seal["about"]

    def _prepare(self):
        """Before the first save."""
        if self._is_prepared:
            return
        together(self._tidy)
        self._writer = self._writer or ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._restored, self._is_prepared = None, True

    def _tidy(self):
        """Clears what killed runs left, and moves aside the steps after the one restored.

        Those are broken, or will be computed anew. Left in place they would count as newest and be kept.
        """
        if jax.process_index() > 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in [path.name for path in self.folder.iterdir()]:
            if ".saving" in name or name.endswith(".deleting"):
                (self.folder / name).rmtree()
        for step in [] if self._restored is None else self.steps():
            if step > self._restored:
                self._move_aside(step)

    def _move_aside(self, step):
        names = (self.folder / f"{step}.aside{n}" for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        (self.folder / str(step)).rename(aside)
        self._say(f"checkpoint {step} is moved to {aside.name}: this run went on from {self._restored}")

    def _finish(self, step, about, table, sums):
        """In the background: waits for Orbax, seals, renames, and only then deletes old checkpoints."""
        saving = self.folder / f"{step}.saving"
        doing = f"checkpoint {step} could not be saved"
        try:
            try:
                self._writer.wait_until_finished()
                if jax.process_index() == 0:
                    for name, value in jax.device_get(sums).items():
                        table[name]["sum"] = int(value)
                    seals.write(saving, about, table)
                    saving.rename(self.folder / str(step))
                    doing = "an old checkpoint could not be deleted"
                    self._delete_old(step)
            finally:
                barrier("sealed")
        except BaseException as fault:
            self._failure = doing, fault

    def _delete_old(self, newest):
        for step in self.steps()[: -self._keep]:
            if step != newest and not (self._keep_every and step % self._keep_every == 0):
                deleting = self.folder / f"{step}.deleting"
                (self.folder / str(step)).rename(deleting)
                deleting.rmtree()

    def _raise_failure(self):
        if self._failure is None:
            return
        (doing, fault), self._failure = self._failure, None
        self._is_prepared = False  # so that the next save clears what this one left
        steps = self.steps()
        newest = f"the newest complete one is {steps[-1]}" if steps else "there is no complete one"
        raise FaultError(f"{doing} in {self.folder} ({one_line(fault)}); {newest}") from fault

    def _say(self, line):
        if jax.process_index() == 0:
            self._log(line)
