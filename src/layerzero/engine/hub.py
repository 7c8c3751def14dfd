"""Kernels of the Hugging Face hub in the registry: found, checked, and tried in a child before they are imported.

Where ``hub.enabled`` is set, every repository that has an adapter is registered: one that a check refused, with that
refusal, so that explanations show it. A build is imported when one of its kernels is loaded, after a child process
imported it and was found unchanged. Everything that is refused is logged once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from layerzero.core.errors import RegistrationError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.system import forking, log
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.plugins import Registry
from layerzero.engine.policy import Policy
from layerzero.engine.services import SERVICES

if TYPE_CHECKING:
    from layerzero.backends.hub.build import Build

_SETTINGS = ("hub.enabled", "hub.folder", "hub.lockfile", "hub.allow")


class Hub:
    """The hub kernels of a registry, in force as long as the settings name them.

    Attributes:
        builds: every repository that was found and has an adapter; what is refused has a reason.
        problems: what is refused and has no kernels to say so, and why.
    """

    def __init__(self, registry: Registry) -> None:
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
        from layerzero.backends.hub.adapters import ADAPTERS  # most processes look at no hub: 3 ms
        from layerzero.backends.hub.checks import builds_in

        found, self.problems = builds_in(policy["hub.folder"], policy["hub.lockfile"], policy["hub.allow"])
        for build in found:
            kernels = [self._guarded(each, build) for each in ADAPTERS[build.name](build)]
            try:
                self._registry.add_all(kernels)
            except RegistrationError as error:
                self.problems[build.repo] = str(error)
                continue
            self._kernels += kernels
            self.builds += (build,)

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
