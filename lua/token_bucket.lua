-- Token bucket, as in the generic cell rate algorithm: the time since which the bucket is not full, the tokens taken since
-- then, and the time of the last one. `rate` tokens come in `period` microseconds, in lowest terms.
--
-- A reservation takes tokens that are still to come. As long as there may be some, half a microsecond is added to the time when
-- the last tokens were taken.

if algorithm == 'bucket' then
  if not bucket then
    -- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
    local function time(tokens, rate, period)
      local over = tokens * (period % rate)
      return tokens * ((period - period % rate) / rate) + (over + -over % rate) / rate
    end

    -- How many tokens come in this time.
    local function come(span, rate, period)
      local left = span % period
      local periods = (span - left) / period
      if rate == 1 then
        return periods
      end

      local count = math.floor(left / period * rate)
      while time(count + 1, rate, period) <= left do
        count = count + 1
      end
      while count > 0 and time(count, rate, period) > left do
        count = count - 1
      end
      return periods * rate + count
    end

    -- How long it takes until this cost fits.
    local function wait_for(cost, quota, since, spent, rate, period)
      local missing = math.min(spent, math.max(0, spent + cost - quota))
      return math.max(1, since + time(missing, rate, period) - now)
    end

    function bucket(key, times, rest, cost, quota, rate, period, cap, reserve)
      local since, spent, at, expires = fetch(key)
      if spent > cap then
        spent = cap
      end
      -- Forgets what has come back, and what was taken too far ahead of the clock: that belongs to a clock that is gone.
      local full = since + (rate == 1 and spent * period or time(spent, rate, period))
      -- A refund may move the begin beyond the last charge.
      local latest = since > at and since or at
      if full <= now or spent == 0 or latest > now and latest > now + math.min(SLACK, time(quota, rate, period)) then
        since, spent, at, full = now, 0, now, now
      end

      local room, counted = quota - spent, times
      if since < now then
        local span = now - since
        room = room + (rate == 1 and (span - span % period) / period or come(span, rate, period))
      end
      if room < times * cost then
        room = room < 0 and 0 or room
        counted = (room - room % cost) / cost
      end
      local waits = counted < times
      -- When a reservation gets its tokens, and when the last one does that was made before.
      local own_turn, last_turn
      if rest then
        local last_at = at
        if at % 1 > 0 and spent > quota then
          local turn = since + time(spent - quota, rate, period)
          if turn > now then
            last_turn = turn
          elseif turn > at then
            last_at = turn
          end
        end
        if reserve and waits and spent + cost <= cap then
          local need = spent + cost - quota - come(math.max(0, now - since), rate, period)
          own_turn = reserve.turn_of(need, cost, quota, wait_for, cost, quota, since, spent, rate, period)
        end

        local refunded_at
        counted, waits, refunded_at = rest(room, counted, cost, quota, own_turn)
        -- Gives tokens back that have not come back already. If nothing was taken after them, these are all that are missing.
        -- Else, those that came since then may all have been theirs: they are given back no second time, nor is the time in
        -- which the next comes.
        -- While requests wait, which have their times already, only the last of them is given back.
        if refunded_at and spent > 0 and refunded_at >= since and (not last_turn or refunded_at == last_turn) then
          local count, left = 0, 0
          if refunded_at < last_at and not last_turn then
            local span = math.max(0, now - refunded_at)
            count = come(span, rate, period)
            -- Rounded up, where the last token came within a microsecond.
            local single = count % rate
            local fraction = single * (period % rate) % rate > 0 and 1 or 0
            left = span - (count - single) / rate * period - time(single, rate, period) + fraction
          end
          if cost > count then
            spent, since = math.max(0, spent - (cost - count)), since + left
            full = since + time(spent, rate, period)
            if full <= now or spent == 0 then
              since, spent, at, full = now, 0, now, now
            end
            write(key, since, spent, at, expires, full)
            return bucket(key, 0, nil, cost, quota, rate, period, cap)
          end
        end
      end

      if counted > 0 then
        local weight = counted * cost
        spent = spent + weight
        if spent > cap then
          -- Whole periods are settled before the numbers grow too large.
          local periods = math.floor(math.max(0, now - since) / period)
          since = since + periods * period
          spent = math.min(math.max(0, spent - weight - periods * rate) + weight, cap)
        end
        if own_turn then
          at = math.max(at - at % 1, now) + 0.5
        elseif at < now then
          at = last_turn and now + 0.5 or now
        end
        full = since + (rate == 1 and spent * period or time(spent, rate, period))
        write(key, since, spent, at, expires, full)
        room = room - weight
        if room < 0 then
          room = 0
        end
        if not waits then
          return counted, room, own_turn and now - own_turn or 0, full - now
        end
      end

      local wait = 0
      if waits then
        if counted == 0 then
          keep(key, full)
        end
        wait = wait_for(cost, quota, since, spent, rate, period)
      end
      return counted, room, wait, full > now and full - now or 0
    end
  end
  rule = bucket
end
