"""What several tests share: harnesses, twins, and devices that are not there."""
