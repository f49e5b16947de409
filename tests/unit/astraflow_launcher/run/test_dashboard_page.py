"""The file that signs a browser in to a run's dashboard."""

from pathlib import Path

import pytest

from astraflow_launcher.run.dashboard_page import has_screen, write_page


def test_the_file_sends_the_token_in_a_form_and_is_its_owners_alone(tmp_path: Path) -> None:
    token, page = tmp_path / "viewer.token", tmp_path / "dashboard.html"
    token.write_text('a.b"><script>\n')
    write_page(page, address="127.0.0.1:8071", token=token)
    text = page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600
    assert '<form method="post" action="http://127.0.0.1:8071/login">' in text
    assert 'value="a.b&quot;&gt;&lt;script&gt;"' in text


@pytest.mark.parametrize(
    ("terminal", "variables", "shows"),
    [
        (True, {"DISPLAY": ":0"}, True),
        (True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        (False, {"DISPLAY": ":0"}, False),
        (True, {}, False),
        (True, {"DISPLAY": ":10", "SSH_CONNECTION": "10.0.0.1"}, False),
    ],
)
def test_a_page_is_opened_only_where_somebody_sits(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, variables: dict[str, str], shows: bool
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert has_screen() is shows
