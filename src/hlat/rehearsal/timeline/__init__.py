"""Operations of rehearsed ranks in time, by the rates of the cost model."""
