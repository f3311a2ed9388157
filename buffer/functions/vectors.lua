-- Row vectors: one character per row of a chunk, or a single character when all rows agree.
--
-- A chunk whose rows move together costs one character per stage, a split one a byte per row, and every
-- operation works by runs of equal rows, with the string library's own loops.

-- (Globals such as `string` exist only while a function runs, not while the library is loaded.)

-- pattern that finds the first other character
local OTHER = {}
local function other_than(char)
  local pattern = OTHER[char]
  if not pattern then
    pattern = '[^' .. char .. ']'
    OTHER[char] = pattern
  end
  return pattern
end

-- What a vector holds that was never written, by the first letter of its name.
local INITIAL = {s = 'w', d = '0', e = 'o', u = '0', c = '0'}

local function vector(chunk, name)
  return chunk.fields[name] or INITIAL[string.sub(name, 1, 1)]
end

-- Set rows [first, first + count).
local function set_rows(chunk, name, first, count, char)
  local old = vector(chunk, name)
  if old == char then return end
  local new = char
  if count < chunk.n then
    if #old == 1 then old = string.rep(old, chunk.n) end
    new = string.sub(old, 1, first) .. string.rep(char, count) .. string.sub(old, first + count + 1)
    if not string.find(new, other_than(char)) then new = char end
  end
  if chunk.before[name] == nil then chunk.before[name] = chunk.fields[name] or false end
  chunk.fields[name] = new
end

-- Call fn(first, count, characters) for each run of rows that agree in all the named vectors.
-- The vectors are read once, so fn may change the rows that it is given.
local function each_run(chunk, names, first, count, fn)
  local stop = first + count
  local vectors = {}
  for k = 1, #names do vectors[k] = vector(chunk, names[k]) end
  local from = first
  while from < stop do
    local to, chars = stop, {}
    for k = 1, #vectors do
      local v = vectors[k]
      if #v == 1 then
        chars[k] = v
      else
        local char = string.sub(v, from + 1, from + 1)
        local other = string.find(v, other_than(char), from + 1)
        if other and other - 1 < to then to = other - 1 end
        chars[k] = char
      end
    end
    fn(from, to - from, chars)
    from = to
  end
end
