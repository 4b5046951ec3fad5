"""The page of `kvlab report` in a real browser without a network: it runs, sorts, filters and fits a phone."""

import json
import re
import subprocess

import pytest

import kvlab
from kvlab.report import data, page
from tests.test_report_page import RUN, WINDOW, Seen

pytestmark = pytest.mark.browser
OFFLINE = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"]
PHONE = 390  # pixels


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    kvlab.run(RUN, out=out)
    return page.write(out / "page")[0]


@pytest.fixture
def chromium(tmp_path):
    """Loads an address with more options and returns its stdout; a message on the console is an error."""

    def run(address, *options):
        command = ["chromium", "--headless", *OFFLINE, f"--user-data-dir={tmp_path / 'profile'}", *options, address]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "CONSOLE" not in made.stderr, made.stderr
        return made.stdout

    return run


def dom(chromium, address):
    return Seen(re.sub(r"^.*?(?=<html)", "", chromium(address, "--dump-dom"), flags=re.DOTALL))


def order(seen):
    return [attrs["data-sort"] for attrs in seen.all("th", scope="row") if "data-sort" in attrs]


def test_scripts_run_to_their_end_and_the_console_stays_empty(report, chromium, tmp_path):
    assert dom(chromium, report.as_uri()).all("html")[0]["data-page"] == "ready"
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace("fillText();", "missing();"))
    with pytest.raises(AssertionError, match="missing is not defined"):
        chromium(broken.as_uri(), "--dump-dom")


def test_a_click_on_a_heading_sorts_and_the_next_turns_it_round(report, chromium):
    table = data.read(report.parent).frame.set_index("policy")
    assert order(dom(chromium, report.as_uri())) == ["full", WINDOW, "INT8"]
    by_bytes = table["resident_bytes"].sort_values().index.tolist()
    down = dom(chromium, f"{report.as_uri()}#sort=resident_bytes")
    assert order(down) == by_bytes[::-1]
    assert down.all("th", **{"data-column": "resident_bytes"})[0]["aria-sort"] == "descending"
    up = dom(chromium, f"{report.as_uri()}#sort=resident_bytes&sort=resident_bytes")
    assert order(up) == by_bytes and up.all("th", **{"data-column": "resident_bytes"})[0]["aria-sort"] == "ascending"
    assert order(dom(chromium, f"{report.as_uri()}#sort=policy")) == sorted(["full", WINDOW, "INT8"], key=str.casefold)


def test_the_text_shows_every_token_its_share_and_the_answers(report, chromium):
    made = json.loads(Seen(report.read_text()).scripts["kept-data"])
    seen = dom(chromium, f"{report.as_uri()}#text=0&policy=1")
    tokens = [attrs for attrs in seen.all("span") if attrs.get("title", "").startswith("token ")]
    shade = made["prompts"][0]["shade"]["1"]
    assert len(tokens) == 256 == len(shade)
    gone = [attrs for attrs in tokens if "gone" in attrs.get("class", "")]
    assert len(gone) == shade.count("0") == 256 - 68
    marked = {"right": 0, "wrong": 0}
    for attrs in tokens:
        for kind in marked:
            marked[kind] += {"evidence", kind} <= set(attrs.get("class", "").split())
    right = sum(each["right"]["1"] for each in made["prompts"][0]["evidence"])
    assert marked == {"right": right, "wrong": 16 - right}


def test_the_filter_shows_lost_answers_only(report, chromium):
    seen = dom(chromium, f"{report.as_uri()}#show=lost")
    shown = [attrs for attrs in seen.all("tr") if "data-kind" in attrs and "hidden" not in attrs]
    assert shown and {(attrs["data-policy"], attrs["data-kind"]) for attrs in shown} == {("0", "lost")}
    pressed = seen.all("button", **{"aria-pressed": "true"})
    assert [attrs["value"] for attrs in pressed] == ["lost"]


def test_the_page_fits_a_phone(report, chromium, tmp_path):
    """No sideways scrolling of the whole; wide tables and pictures scroll in their own boxes."""
    wrapper = tmp_path / "phone.html"
    script = "document.title = this.contentDocument.documentElement.scrollWidth"
    wrapper.write_text(f'<iframe width="{PHONE}" height="800" src="{report.as_uri()}" onload="{script}"></iframe>')
    made = chromium(wrapper.as_uri(), "--allow-file-access-from-files", "--dump-dom")
    assert 0 < int(re.search(r"<title>(\d+)</title>", made)[1]) <= PHONE


@pytest.mark.parametrize("dark", [False, True])
def test_a_picture_of_the_page(report, chromium, tmp_path, dark):
    shot = tmp_path / "page.png"
    how = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    chromium(report.as_uri(), *how, "--window-size=1200,2400", f"--screenshot={shot}")
    assert shot.stat().st_size > 30_000
