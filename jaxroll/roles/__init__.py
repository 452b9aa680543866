"""The processes of a run, one file each: wiring only. Every `main(args)` blocks until its role is over."""
