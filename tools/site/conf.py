"""Sphinx's settings for the documentation site. `make_site.py` beside it makes the pages."""

project = "attnscope"
author = "attnscope contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
source_suffix = {".md": "markdown"}

# Headings get the anchors that GitHub gives them, so one link serves both.
myst_heading_anchors = 4
myst_links_external_new_tab = False
# "```py" marks an example that the tests must not run.
highlight_language = "text"

# Docstrings are plain text: `name` is code, "Args:" and its like are sections.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Columns", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False

# Furo bundles its scripts and styles; a page needs no network.
html_theme = "furo"
html_title = "attnscope"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
