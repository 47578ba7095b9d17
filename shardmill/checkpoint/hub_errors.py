"""Turns what the hub client raises into one line that names the repository and the remedy."""

import contextlib
import errno
from collections.abc import Iterator

import httpx2
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from shardmill.errors import CheckpointError

_AGAIN = "what was downloaded is kept, run again to resume"
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, AssertionError, httpx2.InvalidURL)


@contextlib.contextmanager
def explained(repo: str, revision: str | None, endpoint: str) -> Iterator[None]:
    """Raises CheckpointError instead of any error of the hub client, the network or the disk."""
    try:
        yield
    except (httpx2.HTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{repo}: {_explain(error, repo, revision, endpoint)}") from error


@contextlib.contextmanager
def understood(endpoint: str) -> Iterator[None]:
    """Raises CheckpointError where an answer can't be made sense of, such as a sign-in page of the network."""
    try:
        yield
    except HFValidationError:
        raise  # of what we asked for
    except _NONSENSE as error:
        raise CheckpointError(
            f"{endpoint} did not answer as a hub does ({type(error).__name__}); "
            "check HF_ENDPOINT, and whether a proxy or a sign-in page stands between"
        ) from error


def _explain(error: Exception, repo: str, revision: str | None, endpoint: str) -> str:
    page = f"{endpoint}/{repo}"
    match error:
        case GatedRepoError() if error.response.status_code == 401:
            return f"gated; accept its licence at {page}, then set HF_TOKEN or run `hf auth login`"
        case GatedRepoError():
            return f"gated, and your token has no access yet; accept its licence at {page} with that account"
        case RevisionNotFoundError():
            return f"has no revision {revision!r}; pin revision: one of the commits at {page}/commits/main"
        case RepositoryNotFoundError():
            return f"no such model at {endpoint}; check its name, or set HF_TOKEN if it is private"
        case HfHubHTTPError():
            return _explain_status(error.response.status_code, endpoint)
        case LocalEntryNotFoundError(__cause__=Exception() as cause) if not isinstance(cause, OfflineModeIsEnabled):
            return _explain(cause, repo, revision, endpoint)
        case OfflineModeIsEnabled() | LocalEntryNotFoundError():
            return f"revision {revision} is not complete in the hub cache; run once online without HF_HUB_OFFLINE"
        case HFValidationError():
            return "not a repository name; it reads owner/name"
        case httpx2.HTTPError():
            return f"connection to {endpoint} failed ({type(error).__name__}); {_AGAIN}"
        case OSError(errno=errno.ENOSPC):
            return f"disk full; free space or move the cache with HF_HOME; {_AGAIN}"
        case _:
            return f"{' '.join(str(error).split())[:200]}; {_AGAIN}"


def _explain_status(status: int, endpoint: str) -> str:
    if status == 401:
        return f"{endpoint} refused the token (401); set HF_TOKEN to a valid one or run `hf auth login`"
    if status == 403:
        return f"{endpoint} forbids access (403); give the token read rights for this repository"
    return f"{endpoint} answered {status}; {_AGAIN}"
