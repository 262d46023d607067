"""One file per subcommand of `dtrain`."""
