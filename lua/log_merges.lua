-- Entries of several admissions: those of one grain of time under a limit with a precision, and charges beyond a limit. Refunds
-- take weight back from any entry.

-- Makes the functions that merge entries, and that take weight back.
local function make_log_merges(insert)
  -- Adds weight, merged with the entries of its step. Of charges beyond the limit the last entry is enough.
  local function merge(log, weight, step, beyond)
    local earliest, begin = now, now - now % step
    local limit = beyond and 1 or log.budget - 1
    -- One ahead of the clock is of a clock that is gone.
    local members = call('ZREVRANGEBYSCORE', log.key, now_text, digits(begin), 'LIMIT', '0', limit)
    for _, member in ipairs(members) do
      local at, merged, mark, number = parts_of(member)
      local first = first_at(at, mark, number)
      -- An entry of another precision may begin before the step: merged, it would expire too late.
      if first >= begin and (not beyond or mark == '~') then
        weight = weight + merged
        earliest = math.min(earliest, first)
        call('ZREM', log.key, member)
        log.stored = log.stored - 1
      end
    end
    insert(log, now, beyond and '~' or earliest < now and ';' or '', now - earliest, weight)
  end

  -- Takes weight back from the entries with times from one to another that have an admission of the time `at`. Returns how much
  -- is left to take.
  local function take_back(log, from, upto, at, beyond, left)
    local members = call('ZRANGEBYSCORE', log.key, digits(from), digits(upto), 'LIMIT', '0', log.budget - 1)
    log.budget = log.budget - #members
    for _, member in ipairs(members) do
      local time, weight, mark, number = parts_of(member)
      if left > 0 and first_at(time, mark, number) <= at and (beyond or mark ~= '~') then
        local taken = math.min(left, weight)
        left = left - taken
        log.weight, log.total, log.stored = log.weight - taken, log.total - taken, log.stored - 1
        call('ZREM', log.key, member)
        if weight > taken then
          insert(log, time, mark, number, weight - taken)
        elseif log.kind ~= '=' then
          call('ZINCRBY', log.key, taken, log.header)
        end
      end
    end
    return left
  end

  -- Takes weight back from what was added at that time, as far as it still counts.
  local function refund(log, at, cost, window, grain)
    local valid_from = now - window + 1
    local step = grain > 0 and grain or math.ceil(window / STEPS)
    local step_end = at - at % step + step - 1
    if grain > 0 then
      take_back(log, math.max(at, valid_from), step_end, at, at >= valid_from, cost)
    elseif at >= valid_from then
      local left = take_back(log, at, at, at, true, cost)
      -- Charges beyond the limit, and admissions under a limit with a precision, may be merged with later ones.
      if left > 0 then
        take_back(log, at + 1, step_end, at, true, left)
      end
    end
  end

  return { merge = merge, refund = refund }
end
