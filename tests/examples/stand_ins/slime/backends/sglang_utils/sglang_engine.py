"""An engine of slime: its own address, none on nodes but the first."""

from __future__ import annotations


class SGLangEngine:
    def __init__(self, url: str | None) -> None:
        self._url = url

    def get_url(self):
        return self._url
