"""A Hugging Face repository into the cache, by `huggingface_hub`, with its failures put into one line.

The library's own settings and time limits apply (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_ETAG_TIMEOUT,
HF_HUB_DOWNLOAD_TIMEOUT). Custom model code is not downloaded: the embedded engine does not run it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tqdm import tqdm

from serve_app.errors import ModelFetchError
from serve_app.models import cache

log = logging.getLogger(__name__)

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
ANSWER_TIMEOUT_S = 10.0


class _Bar(tqdm):
    """A bar on a terminal only; drops the library's own keyword."""

    hidden: bool | None = None

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": self.hidden})


class _NoBar(_Bar):
    hidden = True


def fetch_hub(repo: str, root: Path, *, progress: bool = True) -> Path:
    """The snapshot directory of `org/name`; interrupted downloads resume.

    Raises:
        ModelFetchError: no such repository, no access, no network and no complete snapshot in the cache, disk full.
    """
    log.info("%s: asking the Hugging Face Hub", repo)
    with cache.clear_errors(f"fetch {repo}", root):
        try:
            # Here rather than by the library, which takes some disk errors for network errors.
            (root / "hub").mkdir(parents=True, exist_ok=True)
            return _snapshot(repo, root / "hub", _Bar if progress else _NoBar)
        except Exception as error:
            if _is_filesystem(error):
                raise
            raise ModelFetchError(f"cannot fetch {repo}: {_reason(error)}") from error


def _snapshot(repo: str, hub: Path, bar: type[tqdm]) -> Path:
    # Imported here: it takes a while, and known models and local directories do without.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    offline: Exception | None = None
    try:
        # The first request of snapshot_download has no time limit; a Hub that never answers is found out here.
        HfApi().model_info(repo, timeout=ANSWER_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise
    except Exception as error:
        offline = error
    try:
        path = snapshot_download(
            repo, cache_dir=hub, allow_patterns=PATTERNS, tqdm_class=bar, local_files_only=offline is not None
        )
    except LocalEntryNotFoundError as error:
        raise offline or error from None
    return Path(path)


def _is_filesystem(error: BaseException) -> bool:
    # The library's own errors derive from OSError too, but carry no number.
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)


def _reason(error: BaseException) -> str:
    from huggingface_hub import errors

    # From the narrow to the wide: a GatedRepoError is a RepositoryNotFoundError is an HfHubHTTPError.
    if isinstance(error, errors.GatedRepoError):
        return "access is gated; accept its terms on the Hub and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository on the Hub, or it is private and HF_TOKEN does not allow it"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the Hub answered {error.response.status_code}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and no complete copy is in the cache"
    # The HTTP client's own errors; which client it is differs between versions of the library.
    transport = type(error).__module__.startswith("httpx") or isinstance(error, ConnectionError | TimeoutError)
    if transport or isinstance(error, errors.LocalEntryNotFoundError):
        return "the Hub cannot be reached and no complete copy is in the cache"
    first_line = (str(error).splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first_line}"
