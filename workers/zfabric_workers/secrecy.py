"""Texts without the secrets of a connection: its API key, and the password in its address.

Decides in which spellings a secret is looked for: as it was sent, in JSON, in HTML, in a URL, as
Python shows it, and as basic authentication, in any case. Pure. Never shortens a text before.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "[secret]"


def hiding(api_key: str | None, url: str) -> Callable[[str], str]:
    """What takes the key, and the password in `url`, out of a text."""
    parts = urlsplit(url)
    secrets = [api_key] if api_key else []
    if parts.password:
        secrets += [parts.password, unquote(parts.password)]
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
        secrets.append(base64.b64encode(pair.encode()).decode())
    spellings = {spelling for secret in secrets for spelling in _spellings(secret)}
    if not spellings:
        return str
    longest_first = sorted(spellings, key=len, reverse=True)
    known = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)
    return lambda text: known.sub(HIDDEN, text)


def _spellings(secret: str) -> set[str]:
    in_json = json.dumps(secret)[1:-1]
    return {
        secret,
        in_json,
        in_json.replace("/", "\\/"),
        html.escape(secret),
        quote(secret),
        quote(secret, safe=""),
        repr(secret)[1:-1],
    }
