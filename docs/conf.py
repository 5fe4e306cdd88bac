# The documentation site: Sphinx reads the Markdown that tools/site_pages.py writes.
project = "heed"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "heed"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
myst_heading_anchors = 3
highlight_language = "text"
