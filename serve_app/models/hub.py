"""A Hugging Face repository into the cache, by `huggingface_hub`, with its failures put into one line.

The library's own settings apply (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT). Custom model code
is not downloaded: engines here do not run it.
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
METADATA_TIMEOUT_S = 10.0


class _Bar(tqdm):
    """Only on a terminal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)  # huggingface_hub's own keyword
        super().__init__(*args, **{**kwargs, "disable": None})


class _NoBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        super().__init__(*args, **{**kwargs, "disable": True})


def fetch_hub(repo: str, root: Path, *, progress: bool = True) -> Path:
    """The snapshot directory of `org/name`; interrupted downloads resume.

    Raises:
        ModelFetchError: no such repository, no access, no network and no complete snapshot in the cache.
    """
    # Imported here: it takes a while, and known models and local directories do without.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    log.info("%s: asking the Hugging Face Hub", repo)
    try:
        with cache.clear_errors(f"fetch {repo}", root):
            try:
                path = snapshot_download(
                    repo,
                    cache_dir=root / "hub",
                    allow_patterns=PATTERNS,
                    etag_timeout=METADATA_TIMEOUT_S,
                    tqdm_class=_Bar if progress else _NoBar,
                )
            except Exception as error:
                if reason := _reason(error):
                    raise ModelFetchError(f"cannot fetch {repo}: {reason}") from error
                raise
    except HFValidationError:
        raise ModelFetchError(f"{repo} is not a Hugging Face repository id") from None
    return Path(path)


def _reason(error: Exception) -> str | None:
    from httpx import HTTPError
    from huggingface_hub import errors

    # From the narrow to the wide: GatedRepoError is a RepositoryNotFoundError is an HfHubHTTPError is an OSError.
    if isinstance(error, errors.GatedRepoError):
        return "access is gated; accept its terms on the Hub and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository on the Hub, or it is private and HF_TOKEN does not allow it"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the Hub answered {error.response.status_code}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and it is not in the cache"
    if isinstance(error, errors.LocalEntryNotFoundError):
        # What the library raises, whatever went wrong underneath, when no snapshot can stand in.
        return _reason_of_cause(error) or "the Hub cannot be reached and it is not in the cache"
    if isinstance(error, HTTPError | TimeoutError | ConnectionError):
        return "the Hub cannot be reached"
    return None


def _reason_of_cause(error: Exception) -> str | None:
    cause = error.__cause__
    return _reason(cause) if isinstance(cause, Exception) else None
