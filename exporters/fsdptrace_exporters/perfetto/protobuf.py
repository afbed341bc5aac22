"""Perfetto's own format: protobuf with whole nanoseconds. Written with Perfetto's ``perfetto`` package (an extra)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from fsdptrace_exporters.perfetto.sink import Slice, Template

_SEQUENCE = 1  # all packets come from one writer
_CLOCK_REALTIME, _CLOCK_BOOTTIME = 1, 6
_INT64 = 1 << 63
_PROCESS = 1 << 40  # tracks of processes and groups get numbers that no other track has
_GROUP = 1 << 41


class ProtobufSink:
    """Writes to ``stream``.

    Raises:
        ImportError: the ``perfetto`` package is not installed.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        self._pb: Any = pb
        self._builder: Any = StreamingTraceProtoBuilder(stream)
        event = pb.TrackEvent
        self._begin, self._end = event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END
        self._instant, self._counter = event.TYPE_INSTANT, event.TYPE_COUNTER
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._arguments: dict[str, int] = {}
        self._groups: dict[tuple[int, str], int] = {}
        self._new: Any = None  # strings that the next packet introduces
        first = self._packet()
        first.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        first.first_packet_on_sequence = True
        self._put(first)
        # Times are Unix times: the two clocks are one, so that Perfetto can show the time of day.
        snapshot = self._packet()
        for clock in (_CLOCK_BOOTTIME, _CLOCK_REALTIME):
            snapshot.clock_snapshot.clocks.add(clock_id=clock, timestamp=1)
        self._put(snapshot)

    # -- tracks
    def process(self, number: int, name: str, order: int, labels: str) -> None:
        """A process: one rank."""
        packet = self._packet()
        descriptor = packet.track_descriptor
        descriptor.uuid = _PROCESS + number
        descriptor.process.pid = number
        descriptor.process.process_name = name
        descriptor.process.process_labels.append(labels)
        descriptor.sibling_order_rank = order
        descriptor.child_ordering = self._pb.TrackDescriptor.EXPLICIT
        self._put(packet)

    def track(self, number: int, process: int, name: str, order: int, group: str = "") -> None:
        """A track of slices; ``group`` names the tracks that it is shown among."""
        parent = self._group(process, group, order) if group else _PROCESS + process
        self._put(self._track(number, parent, name, order))

    def counter(self, number: int, process: int, name: str, order: int) -> None:
        """A track of bytes."""
        packet = self._track(number, _PROCESS + process, name, order)
        packet.track_descriptor.counter.unit = self._pb.CounterDescriptor.UNIT_SIZE_BYTES
        self._put(packet)

    def _group(self, process: int, name: str, order: int) -> int:
        number = self._groups.get((process, name))
        if number is None:
            number = self._groups[process, name] = _GROUP + len(self._groups)
            packet = self._track(number, _PROCESS + process, name, order)
            packet.track_descriptor.child_ordering = self._pb.TrackDescriptor.EXPLICIT
            self._put(packet)
        return number

    def _track(self, number: int, parent: int, name: str, order: int) -> Any:
        packet = self._packet()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.parent_uuid = number, parent
        descriptor.name, descriptor.sibling_order_rank = name, order
        # Tracks of one name would be shown as one.
        descriptor.sibling_merge_behavior = self._pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        return packet

    # -- events
    def slices(self, track: int, slices: Iterable[Slice]) -> None:
        """Slices of a track, each inside or after the ones before it."""
        ends: list[int] = []
        for item in slices:
            while ends and ends[-1] <= item.t0:
                self._end_at(track, ends.pop())
            packet, event = self._event(track, item.t0, item.what, self._begin)
            for name, value in (("event", item.seq), ("step", item.step)):
                if value is not None and value < _INT64:
                    event.debug_annotations.add(name_iid=self._argument(name), int_value=value)
            if item.flow_out:
                event.flow_ids.append(item.flow_out)
            if item.flow_in:
                event.terminating_flow_ids.append(item.flow_in)
            self._put(packet)
            ends.append(item.t1)
        while ends:
            self._end_at(track, ends.pop())

    def instant(self, track: int, at: int, what: Template) -> None:
        """A moment."""
        packet, _event = self._event(track, at, what, self._instant)
        self._put(packet)

    def value(self, track: int, at: int, value: int) -> None:
        """The counter from this moment on."""
        packet = self._packet()
        packet.timestamp = max(0, at)
        event = packet.track_event
        event.type, event.track_uuid, event.counter_value = self._counter, track, value
        self._put(packet)

    def close(self) -> None:
        """Nothing is left to write: every packet stands for itself."""

    def _end_at(self, track: int, at: int) -> None:
        packet = self._packet()
        packet.timestamp = max(0, at)
        packet.track_event.type, packet.track_event.track_uuid = self._end, track
        self._put(packet)

    def _event(self, track: int, at: int, what: Template, kind: int) -> tuple[Any, Any]:
        if what.encoded is None:
            what.encoded = self._encode(what)
        packet = self._packet()
        packet.timestamp = max(0, at)
        event = packet.track_event
        event.MergeFromString(what.encoded)
        event.type, event.track_uuid = kind, track
        return packet, event

    def _encode(self, what: Template) -> bytes:
        event = self._pb.TrackEvent()
        event.name_iid = self._intern(self._names, what.name, "event_names")
        event.category_iids.append(self._intern(self._categories, what.category, "event_categories"))
        for name, value in what.args.items():
            annotation = event.debug_annotations.add(name_iid=self._argument(name))
            if isinstance(value, int) and -_INT64 <= value < _INT64:
                annotation.int_value = value
            else:
                annotation.string_value = str(value)
        encoded: bytes = event.SerializeToString()
        return encoded

    def _argument(self, name: str) -> int:
        return self._intern(self._arguments, name, "debug_annotation_names")

    def _intern(self, known: dict[str, int], text: str, table: str) -> int:
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            if self._new is None:
                self._new = self._pb.InternedData()
            getattr(self._new, table).add(iid=number, name=text)
        return number

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = 2  # SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def _put(self, packet: Any) -> None:
        if self._new is not None:
            packet.interned_data.CopyFrom(self._new)
            self._new = None
        self._builder.write_packet(packet)
