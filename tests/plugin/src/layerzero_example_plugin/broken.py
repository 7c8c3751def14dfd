"""An entry point whose dependency is missing: it must be reported and harm nothing."""

import a_library_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401
