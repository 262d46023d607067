"""Small training scripts in the documented default usage of common tools, for `dtrain verify script=`."""
