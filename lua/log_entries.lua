-- The entries of a sliding log that is more than a count of equal members, beside what describes them.

-- Makes the functions that read and write entries.
local function make_log_entries()
  -- The entry with this rank.
  local function at_rank(log, rank)
    return call('ZRANGE', log.key, rank, rank)[1]
  end

  -- The weight of the entries from one rank to another.
  local function weight_of(log, from, upto)
    local total = 0
    for _, member in ipairs(call('ZRANGE', log.key, from, upto)) do
      local _, weight = parts_of(member)
      total = total + weight
    end
    return total
  end

  -- Reads what describes a log.
  --
  -- `headers`: how many members describe the others, of which there are `stored`. `longer`: the longer windows, longest first.
  -- For the charge: `total` counts, without the oldest that are `skipped`; `late` have expired and may be in the total, `gone`
  -- are of a clock that is gone, and `budget` may still be read.
  local function read(key, members)
    local log = {
      key = key,
      kind = '=',
      header = nil,
      window = 0,
      longer = {},
      headers = 0,
      stored = 0,
      weight = 0,
      total = 0,
      longest = 0,
      skipped = 0,
      late = 0,
      gone = 0,
      budget = BUDGET,
    }
    local described = call('ZRANGEBYSCORE', key, '-inf', '0', 'WITHSCORES', 'LIMIT', '0', 'HEADERS')
    for i = 1, #described, 2 do
      local kind, window = string.sub(described[i], 1, 1), tonumber(string.sub(described[i], 2))
      if window and kind == '>' then
        table.insert(log.longer, 1, { window, -described[i + 1], described[i] })
        log.headers = log.headers + 1
      elseif window and not log.header and string.find(kind, '[=+#*]') then
        kind = kind == '+' and '=' or kind == '*' and '#' or kind
        log.header, log.kind, log.window, log.weight = described[i], kind, window, -described[i + 1]
        log.headers = log.headers + 1
      end
    end
    log.stored = (members or call('ZCARD', key)) - log.headers
    if log.kind == '=' then
      log.weight = log.stored
    elseif not (log.weight >= 0 and log.weight < EXACT) then
      log.weight = log.weight > 0 and EXACT - 1 or 0
    end
    log.total = log.weight
    return log
  end

  -- The name of the header for the kind and the window that the log has now.
  local function header_of(log)
    local kind = log.kind
    if #log.longer > 0 then
      kind = kind == '=' and '+' or kind == '#' and '*' or kind
    end
    return kind .. digits(log.window)
  end

  -- Removes the header that has been replaced by this one.
  local function replace_header(log, header)
    if log.header then
      call('ZREM', log.key, log.header)
    else
      log.headers = log.headers + 1
    end
    log.header = header
  end

  -- Writes the header if its name has changed, apart from an entry.
  local function describe(log)
    local header = header_of(log)
    if header ~= log.header then
      call('ZADD', log.key, log.kind == '=' and 0 or -log.weight, header)
      replace_header(log, header)
    end
  end

  -- Finds, after a removal, whether the log is of a simpler kind now.
  local function simplify(log, exact)
    if log.kind == '#' and exact and log.stored > 0 and log.weight == log.stored then
      log.kind = '='
    end
    if log.header then
      describe(log)
    end
  end

  -- Removes `count` entries, of which the first has this rank, and returns what they weighed.
  local function remove(log, from, count)
    local upto, weight = from + count - 1, count
    if log.kind ~= '=' then
      weight = weight_of(log, from, upto)
      call('ZINCRBY', log.key, weight, log.header)
    end
    call('ZREMRANGEBYRANK', log.key, from, upto)
    log.stored, log.weight, log.budget = log.stored - count, log.weight - weight, log.budget - count
    return weight
  end

  -- Adds an entry to a log whose weight has it already.
  local function insert(log, at, mark, number, weight)
    local score, header = at == now and now_text or digits(at), header_of(log)
    put(log.key, score, name_of(score, mark, number, weight), log.stored, -log.weight, header, header == log.header and 1 or 2)
    log.stored = log.stored + 1
    if log.header ~= header then
      replace_header(log, header)
    end
  end

  -- Removes what has expired under the longest window that is needed, oldest first, within the budget.
  local function remove_expired(log, exact)
    log.late = call('ZCOUNT', log.key, '(0', digits(now - log.longest))
    local count = operation ~= 'peek' and math.min(log.late, log.budget - 2) or 0
    if count > 0 then
      remove(log, log.headers, count)
      log.late = log.late - count
      simplify(log, exact)
    end
    log.total = log.weight
  end

  -- Subtracts from the total the entries that are stored, but are older than the window of the charge.
  local function skip_older_than(log, window)
    local old = call('ZCOUNT', log.key, '(0', digits(now - window))
    local young = log.stored - old
    -- Of equal members the number is known; else the fewer of both are read.
    local members = log.kind == '=' and 0 or math.min(old, young)
    if old == 0 or members > log.budget - 2 then
      log.late = old
      return
    end
    local weight = old
    if log.kind ~= '=' and old <= young then
      weight = weight_of(log, log.headers, log.headers + old - 1)
    elseif log.kind ~= '=' then
      weight = log.weight - (young > 0 and weight_of(log, log.headers + old, -1) or 0)
    end
    log.total, log.skipped, log.late, log.budget = log.weight - weight, old, 0, log.budget - members
  end

  return at_rank, weight_of, read, describe, simplify, remove, insert, remove_expired, skip_older_than
end
