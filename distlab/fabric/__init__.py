"""What a strategy may ask of the world: links, tasks, locks, a clock. Real and simulated worlds implement it."""

from distlab.fabric.base import Fabric, Kind, Link, Message, Parts, Peer

__all__ = ["Fabric", "Kind", "Link", "Message", "Parts", "Peer"]
