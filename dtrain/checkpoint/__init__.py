"""Checkpoints: who writes what, the files, saving in the background, loading under any layout."""
