"""What the settings name of the hub: a build of each repository, and what is wrong with those that give none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from layerzero.backends.hub import ADAPTERS
from layerzero.backends.hub.build import Build, RefusedBuildError
from layerzero.backends.hub.checks import checked
from layerzero.backends.hub.find import Found, cache_of_the_hub, repositories
from layerzero.backends.hub.lock import Locked, read


def builds_in(
    folder: str | None, lockfile: str | None, allow: Sequence[str]
) -> tuple[tuple[Build, ...], dict[str, str]]:
    """The builds of repositories with an adapter, refused ones with their reason; and what gives none, and why.

    Args:
        folder: where to look; the hub's cache if None.
        lockfile: what pins them; None for whatever is there.
        allow: globs of repositories that may be used.
    """
    try:
        locked = read(Path(lockfile)) if lockfile else None
        found = list(repositories(Path(folder or cache_of_the_hub())))
    except (OSError, ValueError) as error:
        return (), {"hub.lockfile" if lockfile else "hub.folder": str(error)}
    problems, by_name = {}, dict[str, list[Build]]()
    for repo, revisions in groupby(sorted(found), key=lambda each: each.repo):
        name = repo.partition("/")[2]
        if name in ADAPTERS:
            by_name.setdefault(name, []).append(_build(list(revisions), allow, locked))
        else:
            problems[repo] = f"no adapter: wanted one of {', '.join(ADAPTERS)}"
    builds: dict[str, Build] = {}
    for of_name in by_name.values():
        chosen = next((each for each in of_name if each.refused is None), of_name[0])
        rest = [each for each in of_name if each is not chosen]
        problems |= {each.repo: f"{chosen.repo} has its name; hub.allow may name one of them" for each in rest}
        if chosen.refused is None and chosen.id in builds:
            taken = RefusedBuildError(f"{chosen.repo} namespace", "one of its own", f"{builds[chosen.id].repo}'s")
            chosen = dataclasses.replace(chosen, refused=taken.reason)
        builds[chosen.id if chosen.refused is None else chosen.repo] = chosen
    return tuple(builds.values()), problems


def _build(revisions: Sequence[Found], allow: Sequence[str], locked: Mapping[str, Locked] | None) -> Build:
    """A repository's build, with the reason if it is refused; whatever a check cannot read is a refusal, too."""
    found = revisions[-1]
    try:
        found = _one_of(revisions, locked)
        return checked(found, allow, locked)
    except RefusedBuildError as error:
        reason = error.reason
    except Exception as error:  # noqa: BLE001  # of a package that checks, over files that somebody planted
        reason = RefusedBuildError(f"{found.repo} files", "what can be read", f"{type(error).__name__}: {error}").reason
    return Build(found.repo, str(found.path), found.revision, refused=reason)


def _one_of(revisions: Sequence[Found], locked: Mapping[str, Locked] | None) -> Found:
    """The revision that the lockfile pins; without one the only revision, or main. Raises: RefusedBuildError."""
    last = revisions[-1]
    if locked is not None:  # where it pins none of them, its check says so
        pinned = locked.get(last.repo)
        return next((each for each in revisions if pinned and each.revision == pinned.revision), last)
    chosen = revisions if len(revisions) == 1 else [each for each in revisions if each.is_main]
    if not chosen:
        got = ", ".join(each.revision[:12] or str(each.path) for each in revisions)
        hint = "Keep one of them on the disk, or name one in hub.lockfile"
        raise RefusedBuildError(f"{last.repo} revision", "one, or a refs/main that names one of them", got, hint)
    return chosen[0]
