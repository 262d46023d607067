"""`dtrain plan`: does it fit, how fast is it, what does it cost, which strategy."""
