"""The tools that come with Trackway. Imported by `tools.loading`; the core knows none of them."""
