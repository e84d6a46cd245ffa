-- Sliding window log: a sorted set with one member for each admission, scored with its time. A charge fits while the
-- weights admitted within the last window leave room for it.
--
-- A member is named after its time. Members weigh 1 until a heavier one is added: that one ends in `:weight`, and from
-- then on a member `#`, kept at rank 0, has minus the total weight as its score. Where a grain is given, admissions of
-- one grain of time are one member, scored with the last of them.

if algorithms.log then
  local function limit()
    local quota, window, grain = take(), take(), take()
    local expired = text(now - window)

    return {
      algorithm = algorithms.log,
      quota = quota,
      window = window,
      grain = grain,
      expired = expired,
      live = '(' .. expired,
      ttl = text(ttl(window)),
    }
  end

  local function state()
    return {
      key = false,
      -- Members, `#` not among them, and what they weigh.
      stored = 0,
      total = 0,
      -- Of the members, how many have expired, and how many belong to a clock that is gone.
      late = 0,
      gone = 0,
      -- How many members may still be read or removed.
      budget = 0,
      -- Whether the weights are counted, and whether `#` holds them.
      weighted = false,
      marked = false,
      -- Whether a member lies ahead of the clock, and whether one was added.
      ahead = false,
      added = false,
    }
  end

  -- Names are read instead of scores, which Redis would have to print.
  local function time_of(member)
    return tonumber(string.match(member, '^%d+'))
  end

  local function weight_of(member)
    return tonumber(string.match(member, ':(%d+)$') or 1)
  end

  local function drop(state, first, last)
    if state.weighted then
      local dropped = 0
      for _, member in ipairs(call('ZRANGE', state.key, first, last)) do
        dropped = dropped + weight_of(member)
      end
      call('ZINCRBY', state.key, dropped, '#')
      state.total = state.total - dropped
    end

    call('ZREMRANGEBYRANK', state.key, first, last)
    state.stored = state.stored - (last - first + 1)
    state.budget = state.budget - (last - first + 1)
  end

  -- Drops what has expired and what a clock that is gone has left, oldest and newest first, within the budget. So many
  -- members lie `before` the window, `#` among them, and `ahead` of the clock.
  local function settle(state, limit, before, ahead)
    local total = before > 0 and call('ZSCORE', state.key, '#')
    if total then
      state.weighted, state.marked = true, true
      state.total = min(max(0, -tonumber(total)), MAX_TOTAL)
      state.stored = state.stored - 1
      before = before - 1
    end
    local base = state.weighted and 1 or 0

    local dropped = min(before, state.budget - 2)
    if dropped > 0 then
      drop(state, base, base + dropped - 1)
    end
    state.late = before - dropped

    local gone = ahead > 0 and call('ZCOUNT', state.key, '(' .. text(now + min(SLACK, limit.window)), '+inf') or 0
    state.ahead = ahead > gone
    dropped = min(gone, state.budget - 2)
    if dropped > 0 then
      drop(state, -dropped, -1)
    end
    state.gone = gone - dropped

    if state.weighted and state.stored == 0 then
      call('DEL', state.key)
      state.weighted, state.marked = false, false
    end
    if not state.weighted then
      state.total = state.stored - state.late - state.gone
    end
  end

  local function open(state, limit)
    local stored = call('ZCARD', state.key)
    state.stored, state.total, state.late, state.gone, state.budget = stored, stored, 0, 0, BOUND
    state.weighted, state.marked, state.ahead, state.added = false, false, false, false
    if stored == 0 then
      return
    end

    -- In the plain case every member weighs 1 and lies within the window.
    local live = call('ZCOUNT', state.key, limit.live, now_text)
    if live < stored then
      local before = call('ZCOUNT', state.key, '-inf', limit.expired)
      settle(state, limit, before, stored - live - before)
    end
  end

  local function room(state, limit)
    return max(0, limit.quota - state.total)
  end

  -- Adds a member at `at`, whatever else was added at that time, and writes the total down.
  local function insert(state, at, weight)
    local score = at == now and now_text or text(at)
    local suffix = weight > 1 and ':' .. text(weight) or ''
    local total = state.weighted and -state.total

    -- A member of that name has that score, so adding it again changes nothing. Each attempt has another name, and
    -- there are no more than `stored` to meet.
    local member, attempt = score .. suffix, state.stored
    while true do
      local added
      if total then
        added = call('ZADD', state.key, score, member, total, '#') - (state.marked and 0 or 1)
        state.marked = true
      else
        added = call('ZADD', state.key, score, member)
      end
      if added > 0 then
        return
      end
      attempt = attempt + 1
      member = score .. '-' .. text(attempt) .. suffix
    end
  end

  local function add(state, limit, weight)
    -- Beyond the limit, which only charges go, all are one member: no flood of them makes the log longer.
    local beyond = state.stored > 0 and state.total >= limit.quota
    if (weight > 1 or limit.grain > 0 or beyond) and not state.weighted then
      state.weighted, state.total = true, state.stored
    end
    weight = max(1, min(weight, MAX_TOTAL - state.total))
    state.total = state.total + weight

    local first, last
    if limit.grain > 0 then
      first = now - now % limit.grain
      last = first + limit.grain - 1
    elseif beyond then
      first = time_of(call('ZRANGE', state.key, '-1', '-1')[1])
      last = first
    end

    local at, merged = now, 0
    if first then
      local members =
        call('ZREVRANGEBYSCORE', state.key, last, first, 'LIMIT', '0', state.budget - 1)
      for _, member in ipairs(members) do
        at = max(at, time_of(member))
        merged = merged + weight_of(member)
        call('ZREM', state.key, member)
        state.stored = state.stored - 1
      end
    end
    insert(state, at, merged + weight)
    call('PEXPIRE', state.key, limit.ttl)

    state.stored = state.stored + 1
    state.added = true
  end

  -- The time of the member that frees so much weight, or, past the budget, of the last one looked at.
  local function frees(state, need)
    if not state.weighted then
      local rank = state.late + need - 1
      return time_of(call('ZRANGE', state.key, rank, rank)[1])
    end

    -- Most waits are for one of the first.
    local at
    local first, size = 1, 8
    while first < state.budget do
      local last = min(first + size, state.budget) - 1
      for _, member in ipairs(call('ZRANGE', state.key, first, last)) do
        at = time_of(member)
        need = need - weight_of(member)
        if need <= 0 then
          return at
        end
      end
      if last >= state.stored then
        break
      end
      first, size = last + 1, size * 8
    end
    return at or now
  end

  local function wait(state, limit, cost)
    local need = min(state.total + cost - limit.quota, state.total)
    if need <= 0 then
      return limit.window
    end
    keep(state.key, limit.window)
    return max(1, frees(state, need) + limit.window - now)
  end

  -- The wait until the newest entry leaves.
  local function reset(state, limit)
    if state.added and not state.ahead then
      return limit.window
    end

    if state.stored <= state.late + state.gone then
      return 0
    end
    local rank = -1 - state.gone
    return time_of(call('ZRANGE', state.key, rank, rank)[1]) + limit.window - now
  end

  -- Takes weight back from what was added at that time, as far as it still counts.
  local function refund(state, limit, at, weight)
    local first, last = at, at
    if limit.grain > 0 then
      first = at - at % limit.grain
      last = first + limit.grain - 1
    end
    local low, left = max(first, now - limit.window + 1), weight
    local members = call('ZRANGEBYSCORE', state.key, low, last, 'LIMIT', '0', state.budget - 1)

    for _, member in ipairs(members) do
      local held = weight_of(member)
      local taken = min(left, held)
      if taken == 0 then
        break
      end
      call('ZREM', state.key, member)
      state.total = state.total - taken
      left = left - taken
      if held > taken then
        insert(state, time_of(member), held - taken)
      else
        state.stored = state.stored - 1
        if state.weighted then
          call('ZINCRBY', state.key, taken, '#')
        end
      end
    end

    if state.weighted and state.stored == 0 then
      call('DEL', state.key)
    end
  end

  algorithms.log = {
    limit = limit,
    state = state,
    open = open,
    room = room,
    add = add,
    wait = wait,
    reset = reset,
    refund = refund,
  }
end
