"""``layerzero rolling-update``: instances are updated a few at a time, all of them on torch's own kernels meanwhile.

An instance is a process that answers probes with a fallback file (``lz.serve_health(fallback_file=...)``). How it is
updated, and how its file comes and goes, hooks say: functions, or commands. Everything is then looked at from outside,
by ``/livez``, ``/readyz`` and ``/statez``: no hook is believed.

    RollingUpdate({"a": "http://10.0.0.7:9400"}, Hooks(update, fallback_on, fallback_off), file="update.json").run()

1. Prepare: every instance is alive, ready, and of one version with the others; ``checkpoint`` runs on each.
2. Force: ``fallback_on`` on each, until each says that torch's own kernels alone run: old and new instances agree.
3. Update: at most ``max_unavailable`` at a time, and none while another one is not ready. A new process must be alive,
   ready, on the fallback still, and of the version of those updated before. The first that is not ends the update.
4. Restore: all have one version, the same settings and frozen kernels; ``fallback_off`` on each, until it shows.

What was reached is written down, and the same update goes on there when it is run again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import msgspec

from layerzero.core.errors import in_short
from layerzero.core.system import disk, log
from layerzero.serving.probes import InstanceState

WAITING, UPDATING, UPDATED, FAILED = "waiting", "updating", "updated", "failed"

ASK_S, POLL_S, HOOK_S, READY_S = 10.0, 1.0, 600.0, 600.0
"""Seconds: for an answer, between two questions, for a command, and until an instance is as it should be."""

MOST_BYTES = 1 << 20
"""Of an answer, and of a file of what was reached."""


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """No probe answers from elsewhere: the 3xx itself is the answer."""


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stays)  # proxies see no probes inside


class Reply(NamedTuple):
    """What an instance answered; status 0 where it did not, with the error."""

    status: int
    text: str


def ask(url: str, timeout_s: float = ASK_S) -> Reply:
    """Ask a probe by GET."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read(MOST_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.read(MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:  # refused, timed out, cut off, no HTTP
        why = getattr(error, "reason", error)
        return Reply(0, in_short(why if isinstance(why, BaseException) else error))


class Instance(msgspec.Struct, forbid_unknown_fields=True):
    """An instance, and what the update knows of it.

    Attributes:
        name, url: what hooks and people call it, and where its probes answer: ``http://10.0.0.7:9400``.
        reached: waiting, updating, updated or failed.
        told: why it failed.
        process: of its process before its update; empty where none answered.
    """

    name: str
    url: str
    reached: str = WAITING
    told: str = ""
    process: str = ""

    @property
    def steady(self) -> bool:
        """Whether it should serve: no update of it was broken off."""
        return self.reached in (WAITING, UPDATED)

    def __str__(self) -> str:
        return f"{self.name}: {self.reached}{f': {self.told}' if self.told else ''}"


Hook = Callable[[Instance], object]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is done to an instance; each raises, or is a command that does not exit with 0, where it fails.

    Each may run again on the same instance, after an update that was broken off.

    Attributes:
        update: stops it and starts the new one.
        fallback_on, fallback_off: make and remove its fallback file; None for both lets versions run different kernels.
        checkpoint: keeps what may be lost, as ``layerzero perfdb export`` on its machine; None keeps nothing.
    """

    update: Hook
    fallback_on: Hook | None = None
    fallback_off: Hook | None = None
    checkpoint: Hook | None = None

    def __post_init__(self) -> None:
        if (self.fallback_on is None) != (self.fallback_off is None):
            raise ValueError("hooks: wanted fallback_on and fallback_off, or neither, got one of them")


def command(line: str, timeout_s: float = HOOK_S) -> Hook:
    """A hook of a command line, without a shell; ``{name}`` and ``{url}`` stand for the instance's.

    Raises: ValueError for a line that is none.
    """
    try:
        words, why = shlex.split(line), ""
    except ValueError as error:  # a quotation that does not end
        words, why = [], f": {error}"
    if not words:
        raise ValueError(f"hook: wanted a command, got {line!r}{why}")

    def run(instance: Instance) -> None:
        told = [each.replace("{name}", instance.name).replace("{url}", instance.url) for each in words]
        with tempfile.TemporaryFile() as said:  # no pipe: what the command leaves running would hold it open
            done = subprocess.run(  # noqa: S603  # the operator's own command
                told, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False, timeout=timeout_s
            )
            said.seek(max(0, said.tell() - 500))
            lines = said.read().decode(errors="replace").strip().splitlines()
        if done.returncode:
            raise RuntimeError(f"{shlex.join(told)}: exit code {done.returncode}: {lines[-1] if lines else 'no word'}")

    return run


class Reached(msgspec.Struct, forbid_unknown_fields=True):
    """What an update reached.

    Attributes:
        instances: each with its state.
        format: of the file.
        done: whether all are updated and choose their kernels again.
        problem: why it stopped; empty while nothing is wrong.
        versions: of the instances that are updated.
    """

    instances: list[Instance]
    format: int = 1
    done: bool = False
    problem: str = ""
    versions: dict[str, str] = {}

    def lines(self) -> list[str]:
        counts = ", ".join(f"{n} {each}" for each in _STATES if (n := sum(of.reached == each for of in self.instances)))
        head = "done" if self.done else f"stopped: {self.problem}" if self.problem else "under way"
        return [f"{head} ({counts})", *map(str, self.instances)]


_STATES = (UPDATED, UPDATING, FAILED, WAITING)


class StoppedError(Exception):
    """What ends an update; the next run goes on."""


class RollingUpdate:
    """Updates instances a few at a time.

    Args:
        instances: address of the probes of each, by name.
        hooks: what is done to them.
        max_unavailable: how many are updated at a time.
        ready_s: seconds that an instance may take until it is as it should be.
        file: where to write down what is reached; one that exists is gone on with. None: nothing is kept.
        ask, clock, sleep, say: how instances answer and are waited for, and where a line for each step goes.
    Raises: ValueError for instances that are none, a file of another update, and one of an update that is done.
    """

    def __init__(
        self,
        instances: Mapping[str, str],
        hooks: Hooks,
        *,
        max_unavailable: int = 1,
        ready_s: float = READY_S,
        file: str | os.PathLike[str] | None = None,
        ask: Callable[[str], Reply] = ask,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = log.info,
    ) -> None:
        if not instances or any(not url.startswith(("http://", "https://")) for url in instances.values()):
            raise ValueError(f"instances: wanted names with addresses as http://10.0.0.7:9400, got {dict(instances)}")
        if not max_unavailable >= 1:
            raise ValueError(f"max_unavailable: wanted 1 or more, got {max_unavailable}")
        self._hooks, self._most, self._ready_s = hooks, max_unavailable, ready_s
        self._forced = None if hooks.fallback_on is None else True  # what an instance must show once all are forced
        self._ask, self._clock, self._sleep, self._say = ask, clock, sleep, say
        self._file = None if file is None else Path(file)
        self.reached = self._before({name: url.rstrip("/") for name, url in instances.items()})

    def _before(self, instances: Mapping[str, str]) -> Reached:
        """What an earlier run reached, or a new beginning."""
        if self._file is None or not self._file.exists():
            return Reached([Instance(name, url) for name, url in instances.items()])
        found = disk.read_json(self._file, MOST_BYTES, Reached)
        if found is None or found.format != 1:
            raise ValueError(f"{self._file}: wanted what an update reached, got something else; name another file")
        known = {each.name: each.url for each in found.instances}
        if known != instances:
            raise ValueError(f"{self._file}: wanted the instances of that update, {known}, got {dict(instances)}")
        if found.done:
            raise ValueError(f"{self._file}: that update is done; remove the file to begin another")
        return found

    def run(self) -> Reached:
        """Update all, or stop at the first problem; what was reached says which, and of each instance its state.

        Raises: BlockingIOError where another process works on the same file, ValueError for one that is done.
        """
        if self._file is None:
            return self._run_steps()
        with disk.alone(self._file):  # and read again: another process may have gone on with it
            self.reached = self._before({each.name: each.url for each in self.reached.instances})
            return self._run_steps()

    def _run_steps(self) -> Reached:
        self.reached.problem = ""
        try:
            self._prepare()
            self._force(on=True)
            self._update()
            self._finish()
            self.reached.done = True
        except StoppedError as stopped:
            self.reached.problem = str(stopped)
        self._keep()
        self._say(self.reached.lines()[0])
        return self.reached

    def _prepare(self) -> None:
        """Look at all that were not broken off in the middle."""
        steady = [each for each in self.reached.instances if each.steady]
        states = self._settled(steady, None)
        self._of_one_version(steady, states)
        for each in steady:
            each.process = states[each.name].process  # one that is not ready when its turn comes does not tell it then
        if self._hooks.fallback_on is not None:
            for each in steady:
                if not states[each.name].file:
                    wanted = "wanted an instance with a fallback file (--fallback-file), got one that follows none"
                    raise StoppedError(f"{each.name}: {wanted}")
        if self._hooks.checkpoint is not None:
            for each in steady:
                if each.reached == WAITING:
                    self._run(self._hooks.checkpoint, "checkpoint", each)

    def _force(self, *, on: bool) -> None:
        """Switch all to torch's own kernels, or back; one that was broken off shows it once it was updated."""
        hook, name = (self._hooks.fallback_on, "fallback_on") if on else (self._hooks.fallback_off, "fallback_off")
        if hook is None:
            return
        for each in self.reached.instances:
            self._run(hook, name, each)
        steady = [each for each in self.reached.instances if each.steady]
        self._of_one_version(steady, self._settled(steady, on))

    def _of_one_version(self, instances: Sequence[Instance], states: Mapping[str, InstanceState]) -> None:
        """Compare like with like: one that is forced registers no kernel of the hub, and says so in its versions."""
        kinds = {each.name: (each.reached, states[each.name].fallback) for each in instances}
        for kind in dict.fromkeys(kinds.values()):
            self._alike({name: states[name] for name, each in kinds.items() if each == kind}, {"versions"})

    def _update(self) -> None:
        left = [each for each in self.reached.instances if each.reached != UPDATED]
        left.sort(key=lambda each: each.reached == WAITING)  # those that were broken off serve nothing now
        while left:
            now, left = left[: self._most], left[self._most :]
            self._settled([each for each in self.reached.instances if each not in now and each.steady], self._forced)
            for each in now:
                state = self._looked(each, None)
                if isinstance(state, InstanceState):  # else what was written down holds: it may run still
                    each.process = state.process
                each.reached, each.told = UPDATING, ""
                self._say(f"{each.name}: updating")
            self._keep()
            with ThreadPoolExecutor(len(now)) as pool:
                found = list(pool.map(self._updated, now))
            for each, state in zip(now, found, strict=True):
                target = self.reached.versions
                each.told = (
                    state
                    if isinstance(state, str)
                    else _difference("versions", target or state.versions, state.versions)
                )
                each.reached = FAILED if each.told else UPDATED
                if isinstance(state, InstanceState) and not each.told:
                    self.reached.versions = state.versions
                self._say(str(each))
            self._keep()
            failed = [each.name for each in now if each.reached == FAILED]
            if failed:
                raise StoppedError(f"{', '.join(failed)} did not come back as wanted")

    def _updated(self, instance: Instance) -> InstanceState | str:
        """Update one, and look at it until it is as it should be; why it is not."""
        try:
            self._run(self._hooks.update, "update", instance)
        except StoppedError as error:
            return str(error)
        return self._until(instance, self._forced)

    def _finish(self) -> None:
        """Compare all, and let them choose their kernels again."""
        every = {"versions", "settings", "frozen"}
        self._alike(self._settled(self.reached.instances, self._forced), every)
        self._force(on=False)
        self._alike(self._settled(self.reached.instances, None), every)

    def _settled(self, instances: Iterable[Instance], forced: bool | None) -> dict[str, InstanceState]:
        """The states of instances once all are ready. Raises: StoppedError for the first that is not."""
        found: dict[str, InstanceState] = {}
        for each in instances:
            state = self._until(each, forced)
            if isinstance(state, str):
                raise StoppedError(f"{each.name}: {state}")
            found[each.name] = state
        return found

    def _alike(self, states: Mapping[str, InstanceState], fields: set[str]) -> None:
        """Raises: StoppedError for the first instance that differs from the first of all."""
        first = next(iter(states), "")
        for name, state in states.items():
            for field in sorted(fields):
                why = _difference(field, getattr(states[first], field), getattr(state, field))
                if why:
                    raise StoppedError(f"{name} differs from {first}: {why}")

    def _until(self, instance: Instance, forced: bool | None) -> InstanceState | str:
        """Ask until an instance is ready, of a new process where it is updated, and switched; the last problem."""
        end_s = self._clock() + self._ready_s
        while True:
            found = self._looked(instance, forced)
            if isinstance(found, InstanceState) or self._clock() >= end_s:
                return found
            self._sleep(POLL_S)

    def _looked(self, instance: Instance, forced: bool | None) -> InstanceState | str:
        for path, wanted in (("/livez", "alive"), ("/readyz", "ready"), ("/statez", "its state")):
            reply = self._ask(instance.url + path)
            if reply.status != 200:
                said = reply.text.strip().partition("\n")[0]
                return f"{path}: wanted it {wanted}, got {reply.status or 'nothing'}: {said}"
        try:
            state = msgspec.json.decode(reply.text, type=InstanceState)
        except msgspec.MsgspecError as error:
            return f"/statez: wanted what this version of LayerZero tells, got: {error}"
        if instance.reached == UPDATING and state.process == instance.process:
            return "wanted a new process, got the one from before the update"
        if forced is not None and state.fallback != forced:
            wanted = "torch's own kernels alone" if forced else "kernels chosen again"
            return f"wanted {wanted}, got the opposite; it follows {state.file or 'no fallback file'}"
        return state

    def _run(self, hook: Hook, what: str, instance: Instance) -> None:
        try:
            hook(instance)
        except Exception as error:  # whatever a hook raises stops the update, and nothing else
            raise StoppedError(f"{instance.name}: {what}: {in_short(error)}") from error

    def _keep(self) -> None:
        if self._file is not None:
            disk.write_whole(self._file, msgspec.json.format(msgspec.json.encode(self.reached), indent=1) + b"\n")


def _difference(what: str, wanted: object, got: object) -> str:
    """The first thing in which two values differ; empty where they do not."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        for key in sorted({*wanted, *got}):
            if wanted.get(key) != got.get(key):
                return f"{what}: {key}: wanted {wanted.get(key, 'none')}, got {got.get(key, 'none')}"
        return ""
    return "" if wanted == got else f"{what}: wanted {wanted or 'none'}, got {got or 'none'}"
