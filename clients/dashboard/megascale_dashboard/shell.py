"""The HTML around every page; static/app.js fills it from the page's JSON twin."""

from __future__ import annotations

from html import escape

_LINKS = (("/", "Now"), ("/fleet", "Fleet"), ("/jobs", "Jobs"), ("/events", "Events"))

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - megascale</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/uplot-1.6.32.min.css">
<link rel="stylesheet" href="/static/app.css">
<script src="/static/theme.js"></script>
{scripts}</head>
"""
_SCRIPTS = """<script src="/static/uplot-1.6.32.min.js" defer></script>
<script type="module" src="/static/app.js"></script>
"""
_PAGE = """<body>
<a class="skip" href="#page">Skip to the page</a>
<header>
<a class="brand" href="/">megascale</a>
<nav aria-label="Pages">{links}</nav>
<p id="live" role="status" data-state="loading">connecting</p>
<button id="theme" type="button">Dark or light</button>
<form method="post" action="/logout"><button>Log out</button></form>
</header>
<main id="page" tabindex="-1" aria-busy="true"><p class="state">Loading ...</p></main>
<noscript><p class="state">These pages need JavaScript; <a href="{twin}">the same as JSON</a>
does not.</p></noscript>
<footer><a id="twin" href="{twin}">This page as JSON</a>
<span>Keys: <kbd>n</kbd> now, <kbd>f</kbd> fleet, <kbd>j</kbd> jobs, <kbd>e</kbd> events,
<kbd>/</kbd> filter</span></footer>
</body>
</html>
"""
_LOGIN = """<body>
<main id="page" class="login">
<h1>megascale</h1>
<form method="post" action="/login">
<label for="token">Token of the cluster</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Log in</button>
</form>
{problem}<p>The token is in the file <code>token</code> of the run folder.
The command <code>megascale dashboard</code> prints a link that needs no typing.</p>
</main>
</body>
</html>
"""


def page(path: str, twin: str, title: str) -> str:
    """The shell of the page at ``path``, whose JSON is at ``twin``."""
    links = "".join(f'<a href="{link}"{_current(link, path)}>{word}</a>' for link, word in _LINKS)
    head = _HEAD.format(title=escape(title), scripts=_SCRIPTS)
    return head + _PAGE.format(links=links, twin=escape(twin))


def login(problem: str = "") -> str:
    """The page that asks for the token."""
    shown = f'<p class="problem" role="alert">{escape(problem)}</p>\n' if problem else ""
    return _HEAD.format(title="Log in", scripts="") + _LOGIN.format(problem=shown)


def _current(link: str, path: str) -> str:
    inside = path == link or (link == "/jobs" and path.startswith("/jobs/"))
    inside = inside or (link == "/fleet" and path.startswith("/nodes/"))
    return ' aria-current="page"' if inside else ""
