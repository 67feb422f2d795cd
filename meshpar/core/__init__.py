"""The core: a mesh, a description of a model and a list of passes become one plan and one parallel module."""
