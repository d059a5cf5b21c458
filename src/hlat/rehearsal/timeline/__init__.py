"""Operations of rehearsed ranks in time, by the rates of the cost model."""

from hlat.rehearsal.timeline.chrome import timeline_events
from hlat.rehearsal.timeline.replay import RankTimeline, place_in_time

__all__ = ["RankTimeline", "place_in_time", "timeline_events"]
