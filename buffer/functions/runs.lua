-- Runs of equal rows, and moves from signature to signature.

local NONE = {}  -- the runs of a chunk that is not there

local CLASS = {w = 0, c = 0, r = READY, l = LEASED, a = PAST, s = PAST}

local function with(sig, at, text) return string.sub(sig, 1, at - 1) .. text .. string.sub(sig, at + #text) end

-- What a change from one signature to another does to the counters: {field, +1 or -1, ...} per row.
local function changes(config, old, new)
  local list = {}
  local function count(field, by)
    list[#list + 1] = field
    list[#list + 1] = by
  end
  for i, at in ipairs(config.pos) do
    local from, to = CLASS[string.sub(old, at, at)], CLASS[string.sub(new, at, at)]
    if from ~= to then
      if from > 0 then count(config.base[i] + from, -1) end
      if to > 0 then count(config.base[i] + to, 1) end
    end
  end
  local function ended(sig) return string.sub(sig, 1, 1) ~= 'o' and 1 or 0 end
  local function dropped(sig) return string.find(sig, '^[dfsxX]') and 1 or 0 end
  if ended(new) ~= ended(old) then count(ENDED, ended(new) - ended(old)) end
  if dropped(new) ~= dropped(old) then count(DROPPED, dropped(new) - dropped(old)) end
  local uses = string.byte(new, 2) - string.byte(old, 2)
  if uses ~= 0 then count(USES, uses) end
  return list
end

local function append(runs, rows, version, sig)
  if rows == 0 then return end
  local last = #runs
  if last > 0 and runs[last] == sig and runs[last - 1] == version then
    runs[last - 2] = runs[last - 2] + rows
  else
    runs[last + 1], runs[last + 2], runs[last + 3] = rows, version, sig
  end
end

-- Ranges of a chunk's rows are flat arrays {first, count, first, count, ...}, in order and apart from each other.

-- Call fn(signature, version, first, count) for the runs of these rows, as they are now.
local function each_run(chunk, ranges, fn)
  local runs, at, r = chunk.runs, 0, 1
  for k = 1, #runs, 3 do
    local stop = at + runs[k]
    while ranges[r] and ranges[r] < stop do
      local from, to = ranges[r], ranges[r] + ranges[r + 1]
      if from < at then from = at end
      if to <= stop then
        r = r + 2
        fn(runs[k + 2], runs[k + 1], from, to - from)
      else
        fn(runs[k + 2], runs[k + 1], from, stop - from)
        break
      end
    end
    if not ranges[r] then return end
    at = stop
  end
end

-- How rows ended is kept with the chunk.
local function add_end(chunk, first, count, state, step, reason)
  local ends = chunk.ends
  if ends then
    local n = #ends
    ends[n + 1], ends[n + 2], ends[n + 3], ends[n + 4], ends[n + 5] = first, US, count, US, state
    ends[n + 6], ends[n + 7], ends[n + 8], ends[n + 9], ends[n + 10] = US, step, US, reason, RS
  else
    chunk.ends = {first, US, count, US, state, US, step, US, reason, RS}
  end
  chunk.dirty = true
end

-- Rows ended: counted under their label, too.
local function note_end(t, chunk, first, count, state, label, step, reason)
  t.ended = t.ended or {}
  t.ended[label] = (t.ended[label] or 0) + count
  add_end(chunk, first, count, state, step, reason)
end

-- What was learnt under this key.
local function new_memo(config, key)
  local memo = {}
  config.memo[key] = memo
  return memo
end

local function count_learnt(config)
  config.learnt = config.learnt + 1
  if config.learnt > MOST_LEARNT then config.memo, config.learnt = {}, 0 end
end

-- What `to(config, signature, arg)` makes of a signature, or false when it leaves it. `key` names the pair of `to` and `arg`:
-- results are remembered.
local function learn(config, memo, key, sig, to, arg)
  count_learnt(config)
  local goal = to(config, sig, arg)
  local step = goal and goal ~= sig and {to = goal} or false
  if step and string.find(key, '^done') and string.sub(goal, 1, 1) ~= string.sub(sig, 1, 1) then step.done = true end
  memo[sig] = step
  return step
end

-- Move rows of these ranges to the signatures that `to` gives; `tally` brings the counters. Returns how many rows moved.
local function move(t, chunk, ranges, key, to, arg)
  local config, runs, n = t.config, chunk.runs, chunk.n
  local memo = config.memo[key] or new_memo(config, key)
  if runs[1] == n and ranges[1] == 0 and ranges[2] == n then  -- the whole chunk is one run
    local step = memo[runs[3]]
    if step == nil then step = learn(config, memo, key, runs[3], to, arg) end
    if not step then return 0 end
    if step.done then note_end(t, chunk, 0, n, 'done', 'done', -1, '') end
    chunk.runs = {n, runs[2], step.to}
    return n
  end
  local new, moved, at, r = {}, 0, 0, 1
  for k = 1, #runs, 3 do
    local version, sig, stop = runs[k + 1], runs[k + 2], at + runs[k]
    local step
    while ranges[r] and ranges[r] < stop do
      local from, upto = ranges[r], ranges[r] + ranges[r + 1]
      if from < at then from = at end
      if upto > stop then upto = stop end
      if step == nil then
        step = memo[sig]
        if step == nil then step = learn(config, memo, key, sig, to, arg) end
      end
      if step then
        local part = upto - from
        if step.done then note_end(t, chunk, from, part, 'done', 'done', -1, '') end
        if from > at then append(new, from - at, version, sig) end
        append(new, part, version, step.to)
        moved = moved + part
        at = upto
      end
      if ranges[r] + ranges[r + 1] > stop then break end
      r = r + 2
    end
    if stop > at then append(new, stop - at, version, sig) end
    at = stop
  end
  if moved > 0 then chunk.runs = new end
  return moved
end

-- The policy version that made these rows: the least of what was told.
local function set_version(chunk, ranges, version)
  local runs, new, at, r = chunk.runs, {}, 0, 1
  for k = 1, #runs, 3 do
    local old, sig, stop = runs[k + 1], runs[k + 2], at + runs[k]
    local told = old < 0 and version or math.min(old, version)
    while ranges[r] and ranges[r] < stop do
      local from, upto = math.max(at, ranges[r]), math.min(stop, ranges[r] + ranges[r + 1])
      append(new, from - at, old, sig)
      append(new, upto - from, told, sig)
      at = upto
      if ranges[r] + ranges[r + 1] > stop then break end
      r = r + 2
    end
    append(new, stop - at, old, sig)
    at = stop
  end
  chunk.runs = new
end

-- Tokens of each row, four bytes little-endian.
local function set_tokens(chunk, first, packed)
  if #chunk.tokens == 0 then chunk.tokens = string.rep('\0', 4 * chunk.n) end
  chunk.tokens = string.sub(chunk.tokens, 1, 4 * first) .. packed .. string.sub(chunk.tokens, 4 * first + #packed + 1)
  chunk.dirty = true
end

local function tokens_of(chunk, first, count)
  if #chunk.tokens == 0 then return 0 end
  local sum = 0
  for row = first, first + count - 1 do sum = sum + struct.unpack('<I4', chunk.tokens, 4 * row + 1) end
  return sum
end

local function sig_is_over(config, sig)
  if string.find(sig, '^[otx]') then return false end
  for i, stage in ipairs(config.stages) do
    if stage.ended and string.byte(sig, config.pos[i]) ~= 97 then return false end
  end
  return true
end

-- A chunk is freed when every row ended, is durable if trained, dropped if dead, and was seen by the stages that want
-- ended rows.
local function is_over(t, chunk)
  local memo, runs = t.config.memo.over or new_memo(t.config, 'over'), chunk.runs
  for k = 3, #runs, 3 do
    local over = memo[runs[k]]
    if over == nil then
      over = sig_is_over(t.config, runs[k])
      memo[runs[k]] = over
    end
    if not over then return false end
  end
  return true
end

-- Stages whose indexes change when a chunk that is one run goes from one signature to another ('': there is none): those whose chunks
-- become ready, those whose chunks are ready no more, and those of which more than that changes.
local function affected(config, old, new)
  local enters, leaves, others = {}, {}, {}
  for i, stage in ipairs(config.stages) do
    local at = config.pos[i]
    local from, to = string.sub(old, at, at), string.sub(new, at, at)
    local opened, open = from == 'w' or from == 'c', to == 'w' or to == 'c'
    if stage.by_unit or stage.min_batch > 1 then
      if (from == 'r') ~= (to == 'r') or opened ~= open or (stage.selector == 'prioritized' and new == '') then others[#others + 1] = i end
    elseif (from == 'r') ~= (to == 'r') then
      local list = to == 'r' and enters or leaves
      list[#list + 1] = stage
    end
  end
  return enters, leaves, others
end

-- What it brings with it that rows of one chunk, all alike, go from one signature to another ('': there was no such chunk):
-- changes of the counters and indexes, and whether the chunk is over.
local function change_of(config, old, new)
  local memo = config.memo.change or new_memo(config, 'change')
  local by_new = memo[old]
  if not by_new then
    by_new = {}
    memo[old] = by_new
  end
  local found = by_new[new]
  if not found then
    count_learnt(config)
    local over = sig_is_over(config, new)
    local enters, leaves, others = affected(config, old, over and '' or new)
    local counters = changes(config, old == '' and config.blank or old, new)
    found = {counters = counters, enters = enters, leaves = leaves, others = others, over = over}
    by_new[new] = found
  end
  return found
end

local function add_up(state, list, rows)
  for k = 1, #list, 2 do state[list[k]] = state[list[k]] + list[k + 1] * rows end
end

-- Bring the counters from the rows as they were counted last to the rows as they are now.
local function tally(t, chunk)
  local old, new = chunk.counted or chunk.before, chunk.runs
  if old == NONE then old = {chunk.n, -1, t.config.blank} end
  chunk.counted = new
  local a, b, at, old_stop, new_stop, rows = 3, 3, 0, old[1], new[1], {}
  while old[a] and new[b] do
    local from, to, stop = old[a], new[b], old_stop < new_stop and old_stop or new_stop
    if from ~= to then
      local change = change_of(t.config, from, to)
      rows[change] = (rows[change] or 0) + stop - at
    end
    if old_stop == stop then a, old_stop = a + 3, stop + (old[a + 1] or 0) end
    if new_stop == stop then b, new_stop = b + 3, stop + (new[b + 1] or 0) end
    at = stop
  end
  for change, some in pairs(rows) do add_up(t.state, change.counters, some) end
end
