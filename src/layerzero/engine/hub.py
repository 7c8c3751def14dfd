"""Kernels of the Hugging Face hub in the registry: found, checked, and tried in a child before they are imported.

Where ``hub.enabled`` is set, every repository that has an adapter is registered: one that a check refused, with that
refusal, so that explanations show it. A build is imported when one of its kernels is loaded, after a child process
imported it and was found unchanged. Everything that is refused is logged once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from layerzero.backends import hub
from layerzero.backends.hub import checks, find, lock
from layerzero.backends.hub.build import Build, RefusedBuildError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.system import forking
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.policy import Policy
from layerzero.engine.services import SERVICES

log = logging.getLogger("layerzero")

_SETTINGS = ("hub.enabled", "hub.folder", "hub.lockfile", "hub.allow")


class _Registry(Protocol):
    def holds(self, kernel: Kernel) -> bool: ...

    def add_all(self, kernels: Sequence[Kernel]) -> None: ...

    def drop_all(self, kernels: Sequence[Kernel]) -> None: ...


class Hub:
    """The hub kernels of a registry, in force as long as the settings name them.

    Attributes:
        builds: every repository that was found and has an adapter; what is refused has a reason.
        problems: what is refused and has no kernels to say so, and why.
    """

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry
        self._lock = forking.rlock()
        self._trying = False
        self._kernels: list[Kernel] = []
        self._policy: Policy | None = None
        self._settings: object = None
        self._tried: dict[str, str] = {}
        self._logged: set[str] = set()
        self.builds: tuple[Build, ...] = ()
        self.problems: dict[str, str] = {}

    def awaited(self) -> bool:
        """Whether the settings changed since the hub was last looked at."""
        return CONFIGURATION.policy is not self._policy

    def told(self) -> dict[str, str]:
        """Every repository that gives no kernel, and why."""
        refused = {each.repo: each.refused.message for each in self.builds if each.refused is not None}
        tried = {each.repo: self._tried[each.sha256] for each in self.builds if self._tried.get(each.sha256)}
        return self.problems | refused | tried

    def load(self) -> None:
        """Register what the settings name, in place of what they named before."""
        policy = CONFIGURATION.policy
        settings = [policy.enabled, *(policy[name] for name in _SETTINGS)]
        if settings != self._settings:
            self._registry.drop_all([each for each in self._kernels if self._registry.holds(each)])
            self._kernels, self.builds, self.problems = [], (), {}
            if policy.enabled and policy["hub.enabled"]:
                self._find(policy)
            self._settings = settings
            for name, why in self.told().items():
                self._log(f"{name} of the hub is not used: {why}")
        self._policy = policy

    def _find(self, policy: Policy) -> None:
        try:
            where = policy["hub.lockfile"]
            locked = lock.read(Path(where)) if where else None
            folder = Path(policy["hub.folder"] or find.cache_of_the_hub())
            found = list(find.repositories(folder))
        except (OSError, ValueError) as error:
            self.problems["hub.lockfile" if policy["hub.lockfile"] else "hub.folder"] = str(error)
            return
        builds: dict[str, Build] = {}
        for each in _one_revision(found, locked or {}):
            name = each.repo.partition("/")[2]
            if name not in hub.ADAPTERS:
                self.problems[each.repo] = f"no adapter: wanted one of {', '.join(hub.ADAPTERS)}"
                continue
            build = _checked(each, policy["hub.allow"], locked)
            other = builds.get(name)
            if other is None or (other.refused is not None and build.refused is None):
                builds[name] = build
                build = other or build
            if other is not None:
                self.problems[build.repo] = f"{builds[name].repo} has its name; hub.allow may name one of them"
        self._take(builds.values())

    def _take(self, builds: Iterable[Build]) -> None:
        taken: dict[str, Build] = {}
        for build in builds:
            if build.refused is None and build.id in taken:
                error = RefusedBuildError(f"{build.repo} namespace", "one of its own", f"{taken[build.id].repo}'s")
                build = dataclasses.replace(build, refused=error.reason)  # noqa: PLW2901  # the same one, refused
            elif build.refused is None:
                taken[build.id] = build
            kernels = [self._guarded(each, build) for each in hub.kernels_of(build)]
            self._registry.add_all(kernels)
            self._kernels += kernels
            self.builds += (build,)
        for repo in sorted(self.problems.keys() & {each.repo for each in self.builds}):
            del self.problems[repo]

    def _guarded(self, kernel: Kernel, build: Build) -> Kernel:
        """A kernel that is loaded once a child has imported its build."""

        @functools.wraps(kernel.load)
        def load(facts: Facts) -> Callable[..., Any]:
            if problem := self.problem_of(build):
                raise ImportError(problem)
            return kernel.load(facts)

        return dataclasses.replace(kernel, load=load)

    def problem_of(self, build: Build) -> str:
        """What a child process found as it imported a build; empty where it changed nothing; once a process."""
        self._try([build])
        return self._tried[build.sha256]

    def _try(self, builds: Sequence[Build]) -> None:
        with self._lock:
            new = [each for each in builds if each.refused is None and each.sha256 not in self._tried]
            self._trying = True
            try:
                self._tried |= SERVICES.try_hub(new) if new else {}
            finally:
                self._trying = False
            for each in new:
                if why := self._tried[each.sha256]:
                    self._log(f"{each.repo} of the hub is not used: {why}")

    def admitted(self) -> list[Build]:
        """The builds that this process imports, or would: those that a child may; none for a child that tries them."""
        with self._lock:
            if self._trying:
                return []
            self._try(self.builds)
            return [each for each in self.builds if each.refused is None and not self._tried[each.sha256]]

    def for_children(self) -> dict[str, str]:
        """Variables by which a child finds the builds that this process may import, and no others."""
        admitted = self.admitted()
        if not admitted:
            return {}
        policy = CONFIGURATION.policy
        given = {
            "LAYERZERO_HUB_ENABLED": "1",
            "LAYERZERO_HUB_FOLDER": policy["hub.folder"],
            "LAYERZERO_HUB_LOCKFILE": policy["hub.lockfile"],
            "LAYERZERO_HUB_ALLOW": ",".join(each.repo for each in admitted),
        }
        return {name: value for name, value in given.items() if value}

    def _log(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)


def _checked(found: find.Found, allow: Sequence[str], locked: dict[str, lock.Locked] | None) -> Build:
    """A build, with the reason if it is refused; whatever a check cannot read is a refusal, too."""
    try:
        return checks.checked(found, allow, locked)
    except RefusedBuildError as error:
        reason = error.reason
    except Exception as error:  # noqa: BLE001  # a package that checks, of what somebody planted
        reason = RefusedBuildError(f"{found.repo} files", "what can be read", f"{type(error).__name__}: {error}").reason
    return Build(found.repo, str(found.path), found.revision, refused=reason)


def _one_revision(found: Iterable[find.Found], locked: dict[str, lock.Locked]) -> list[find.Found]:
    """One revision of each repository: the one that the lockfile pins, else the last."""
    chosen: dict[str, find.Found] = {}
    for each in found:
        pinned = locked.get(each.repo)
        if each.repo not in chosen or (pinned is None or each.revision == pinned.revision):
            chosen[each.repo] = each
    return list(chosen.values())
