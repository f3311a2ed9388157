"""The controller: one control loop, calls, roster, and the local supervisor."""
