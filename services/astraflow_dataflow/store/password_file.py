"""Credentials for Redis whose password comes from a file. Used by `connection`."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from redis.credentials import CredentialProvider

from astraflow_kit.settings import read_secret


class PasswordFile(CredentialProvider):
    """The user of an address and the password in a file, read at every new connection so that it can be rotated."""

    def __init__(self, url: str, path: Path) -> None:
        self._user = unquote(urlsplit(url).username or "")
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User, if the address names one, and password. Raises SettingsError for a file that cannot be read."""
        password = read_secret(self._path)
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same; the file is small and local."""
        return self.get_credentials()


def without_credentials(url: str) -> str:
    """The address alone."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
