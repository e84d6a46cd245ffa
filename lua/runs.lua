-- Reads the runs and their charges, and finds which rules they need.

-- The rules: nil where no charge needs it, and `true` until the file of the algorithm makes it.
--
-- A rule is called with the key, how many callers there are, `rest`, the cost, the quota, three parameters and the request. It
-- reads the key, finds how many of the callers fit, and adds their weight. It returns how many are counted, what remains, the
-- wait, and the time to a full reset.
local sliding_log, coarse_log, weighted_log, sliding_counter, fixed_window, token_bucket, concurrency, ban
-- What decides the other charges of a request: nil where all charges decide alone, and `true` until `lua/charges.lua` makes it.
local rest, reset_key
-- Whether charges have lines, and how many keys of these follow the keys of the charges.
local has_lines, line_keys = false, 0

-- Of a run, and of its last charge.
local operation, requests, size, times, spans, position
local algorithm, cost, quota, x, y, z
-- For each window and grain of a log what is written as text once for all of its charges, linked: `lua/log_members.lua` fills it.
local texts
-- Whether the call is one check of one charge, as most are; for the others, the runs.
local single = #ARGV == 1
local runs = not single and {} or nil
-- The keys, and how many arguments are runs.
local keys, last_run = KEYS, #ARGV

if last_run > 1 then
  local word, count = unpack_numbers('<sd', ARGV[last_run])
  if word == 'across' then
    keys = {}
    for place = count + 1, last_run - 1 do
      keys[place - count] = ARGV[place]
    end
    last_run = count
  end
end

for n = 1, last_run do
  if keys ~= KEYS then
    operation, requests, size, times, spans, position = unpack_numbers('<sdddd', ARGV[n])
  else
    operation, requests, size, times, position = unpack_numbers('<sddd', ARGV[n])
  end
  local admitted_at, process, waiting
  if operation == 'reset' then
    reset_key = true
  elseif operation == 'refund' then
    admitted_at, position = unpack_numbers('<d', ARGV[n], position)
  elseif operation == 'wait' or operation == 'peek' then
    local count
    process, count, position = unpack_numbers('<dd', ARGV[n], position)
    -- How many wait and one more; 0 for a request that has just arrived.
    waiting = count > 0 and {} or nil
    for place = 1, 2 * count - 2 do
      waiting[place], position = unpack_numbers('<d', ARGV[n], position)
    end
  elseif operation == 'within' then
    if now < requests or now >= size then
      return pack('<d', now)
    end
    requests, size = 0, 0
  end

  single = single and requests == 1 and size == 1
  -- The charges are a linked list.
  local first, last, lines = nil, nil, 0
  for _ = 1, size do
    algorithm, cost, quota, x, y, z, position = unpack_numbers('<sddddd', ARGV[n], position)
    local line = false
    if algorithm == 'line' then
      -- What follows is the charge.
      line, lines, has_lines = { longest = cost, ahead = quota, number = x, cycle = y, leads = z == 1 }, lines + 1, true
      algorithm, cost, quota, x, y, z, position = unpack_numbers('<sddddd', ARGV[n], position)
    end
    if algorithm == 'log' then
      sliding_log = true
      weighted_log = weighted_log or has_lines or y > 0 or cost > 1 or operation == 'refund'
      if y == 0 and (cost == 1 or line) or operation == 'check' then
        coarse_log = coarse_log or y > 0
        if not texts or texts.window ~= x or texts.grain ~= y then
          texts = { window = x, grain = y, before = texts, header = false, expires = false }
        end
        z = texts
      end
    elseif algorithm == 'counter' then
      sliding_counter = true
    elseif algorithm == 'bucket' then
      token_bucket = true
    elseif algorithm == 'concurrency' then
      concurrency = true
    elseif algorithm == 'ban' then
      ban = true
    else
      fixed_window = true
      if x == 0 then
        -- The window of the calendar, which is one of three around the time that the caller guessed.
        local boundaries = { unpack_numbers('<dddd', ARGV[n], position) }
        position = boundaries[5]
        for i = 2, 4 do
          if boundaries[i - 1] <= now and now < boundaries[i] then
            y, z = boundaries[i - 1], boundaries[i]
          end
        end
      end
    end

    if size > 1 or line or operation ~= 'check' then
      single, rest = false, true
    end
    if not single then
      local charge = { algorithm, cost, quota, x, y, z, false, 0, line }
      if last then
        last[C_NEXT] = charge
      end
      first, last = first or charge, charge
    end
  end
  if not single then
    runs = runs or {}
    runs[n] = {
      operation = operation,
      requests = requests,
      size = size,
      times = times,
      admitted_at = admitted_at,
      first = first,
      position = position,
      before = false,
      lines = lines,
      first_line = line_keys + 1,
      process = process,
      waiting = waiting,
    }
    if spans == 1 then
      runs[n].spans = true
    end
    line_keys = line_keys + requests * lines
  end
end
