"""The values of a module on a mesh: made, gathered whole, averaged."""
