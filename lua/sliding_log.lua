-- Sliding window log: a sorted set with one member for each admission, scored with its time. A charge fits while the
-- weights admitted within the last window leave room for it.
--
-- Members weigh 1 until a heavier one is added: that one ends in `:weight`, and from then on a member `#`, kept at
-- rank 0, has minus the total weight as its score.

local log = {}
algorithms.log = log

function log.limit(take)
  local quota, window = take(), take()

  return {
    quota = quota,
    window = window,
    slack = math.min(SLACK, window),
    expired = text(now - window),
    live = '(' .. text(now - window),
    ttl = ttl(window),
  }
end

local function drop(state, first, last)
  if state.weighted then
    local dropped = 0
    for _, member in ipairs(call('ZRANGE', state.key, first, last)) do
      dropped = dropped + tonumber(string.match(member, ':(%d+)$') or 1)
    end
    call('ZINCRBY', state.key, text(dropped), '#')
    state.total = state.total - dropped
  end

  call('ZREMRANGEBYRANK', state.key, first, last)
  state.stored = state.stored - (last - first + 1)
  state.budget = state.budget - (last - first + 1)
end

-- Drops what has expired and what a clock that is gone has left, oldest and newest first, within the budget.
local function settle(state, limit)
  local total = call('ZSCORE', state.key, '#')
  if total then
    state.weighted, state.total = true, -tonumber(total)
    state.stored = state.stored - 1
  end
  local base = state.weighted and 1 or 0
  local latest = text(now + limit.slack)

  state.late = call('ZCOUNT', state.key, '0', limit.expired)
  local dropped = math.min(state.late, state.budget - 2)
  if dropped > 0 then
    drop(state, base, base + dropped - 1)
    state.late = state.late - dropped
  end

  local gone = call('ZCOUNT', state.key, '(' .. latest, '+inf')
  dropped = math.min(gone, state.budget - 2)
  if dropped > 0 then
    drop(state, -dropped, -1)
    gone = gone - dropped
  end

  if state.weighted and state.stored == 0 then
    call('DEL', state.key)
    state.weighted, state.total = false, 0
  end
  if not state.weighted then
    state.total = state.stored - state.late - gone
  end
  state.ahead = call('ZCOUNT', state.key, '(' .. now_text, latest) > 0
end

function log.open(key, limit)
  local state = { key = key, total = 0, stored = 0, late = 0, budget = BOUND, weighted = false, ahead = false }
  state.stored = call('ZCARD', key)
  if state.stored == 0 then
    return state
  end

  -- In the plain case every member weighs 1 and lies within the window.
  state.total = call('ZCOUNT', key, limit.live, now_text)
  if state.total ~= state.stored then
    settle(state, limit)
  end
  return state
end

function log.room(state, limit)
  return math.max(0, limit.quota - state.total)
end

function log.add(state, limit, weight)
  if weight > 1 and not state.weighted then
    call('ZADD', state.key, text(-state.stored), '#')
    state.weighted, state.total = true, state.stored
  end

  local suffix = weight > 1 and ':' .. text(weight) or ''
  local member, attempt = now_text .. suffix, state.stored
  while call('ZADD', state.key, 'NX', now_text, member) == 0 do
    attempt = attempt + 1
    member = now_text .. '-' .. text(attempt) .. suffix
  end
  if state.weighted then
    call('ZINCRBY', state.key, text(-weight), '#')
  end
  call('PEXPIRE', state.key, limit.ttl)

  state.stored = state.stored + 1
  state.total = state.total + weight
  state.added = true
end

-- The wait until the entry leaves that frees enough weight, or, past the budget, the last one looked at.
function log.wait(state, limit, cost)
  local need = math.min(state.total + cost - limit.quota, state.total)
  if need <= 0 then
    return limit.window
  end
  if call('PTTL', state.key) == -1 then
    call('PEXPIRE', state.key, limit.ttl)
  end

  local at
  if state.weighted then
    local entries = call('ZRANGE', state.key, 1, state.budget - 1, 'WITHSCORES')
    for i = 1, #entries, 2 do
      at = tonumber(entries[i + 1])
      need = need - tonumber(string.match(entries[i], ':(%d+)$') or 1)
      if need <= 0 then
        break
      end
    end
  else
    local rank = state.late + need - 1
    at = tonumber(call('ZRANGE', state.key, rank, rank, 'WITHSCORES')[2])
  end
  return math.max(1, at + limit.window - now)
end

-- The wait until the newest entry leaves.
function log.reset(state, limit)
  if state.added and not state.ahead then
    return limit.window
  end

  local latest = text(now + limit.slack)
  local newest = call('ZREVRANGEBYSCORE', state.key, latest, limit.live, 'WITHSCORES', 'LIMIT', '0', '1')[2]
  return newest and tonumber(newest) + limit.window - now or 0
end
