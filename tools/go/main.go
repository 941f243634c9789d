// Verify a bundle's heads, inclusion and consistency proofs with the packages that Go itself verifies its checksum
// database with. Nothing here is written by us but the reading of files: it shows that others agree with our tree.
//
//	verify KEY BUNDLE [RECEIPT ENTRY]
//
// A receipt is a C2SP tlog-proof; ENTRY a file with the bytes of the entry that it is for. One line of JSON says what
// was verified; anything that does not verify ends it with status 1.
package main

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type entryLine struct {
	LeafIndex *int64   `json:"leaf_index"`
	Entry     string   `json:"entry"`
	Proof     []string `json:"proof"`
}

type headLine struct {
	Size  int64    `json:"size"`
	Note  string   `json:"note"`
	Proof []string `json:"proof"`
}

type manifest struct {
	Complete bool `json:"complete"`
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func hash(text string) tlog.Hash {
	raw, err := base64.StdEncoding.DecodeString(text)
	must(err)
	if len(raw) != tlog.HashSize {
		must(fmt.Errorf("%d bytes are no hash", len(raw)))
	}
	return tlog.Hash(raw)
}

func hashes(texts []string) []tlog.Hash {
	found := make([]tlog.Hash, 0, len(texts))
	for _, text := range texts {
		found = append(found, hash(text))
	}
	return found
}

// open returns size and root of a checkpoint that the key has signed.
func open(text string, known note.Verifiers) (int64, tlog.Hash) {
	opened, err := note.Open([]byte(text), known)
	must(err)
	lines := strings.Split(opened.Text, "\n")
	if len(lines) != 4 || lines[3] != "" || lines[0] != opened.Sigs[0].Name {
		must(fmt.Errorf("that is no checkpoint of the key's log: %q", opened.Text))
	}
	size, err := strconv.ParseInt(lines[1], 10, 64)
	must(err)
	return size, hash(lines[2])
}

func lines(path string, each func([]byte)) {
	file, err := os.Open(path)
	must(err)
	defer file.Close()
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<22)
	for scanner.Scan() {
		each(scanner.Bytes())
	}
	must(scanner.Err())
}

func verifyReceipt(path, entry string, known note.Verifiers) {
	raw, err := os.ReadFile(path)
	must(err)
	data, err := os.ReadFile(entry)
	must(err)
	before, signed, _ := strings.Cut(string(raw), "\n\n")
	said := strings.Split(before, "\n")
	if said[0] != "c2sp.org/tlog-proof@v1" {
		must(fmt.Errorf("that is no tlog proof"))
	}
	index, err := strconv.ParseInt(strings.TrimPrefix(said[1], "index "), 10, 64)
	must(err)
	size, root := open(signed, known)
	must(tlog.CheckRecord(hashes(said[2:]), size, root, index, tlog.RecordHash(data)))
}

func main() {
	verifier, err := note.NewVerifier(os.Args[1])
	must(err)
	known := note.VerifierList(verifier)
	folder := os.Args[2]
	var about manifest
	raw, err := os.ReadFile(filepath.Join(folder, "manifest.json"))
	must(err)
	must(json.Unmarshal(raw, &about))

	var stored []tlog.Hash // as tlog lays out the hashes of all complete subtrees
	reader := tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		found := make([]tlog.Hash, len(indexes))
		for place, index := range indexes {
			found[place] = stored[index]
		}
		return found, nil
	})
	var heads []headLine
	lines(filepath.Join(folder, "heads.jsonl"), func(raw []byte) {
		var line headLine
		must(json.Unmarshal(raw, &line))
		heads = append(heads, line)
	})
	var lastSize int64
	var lastRoot tlog.Hash
	for _, line := range heads {
		size, root := open(line.Note, known)
		if size != line.Size {
			must(fmt.Errorf("the line says %d, the note %d", line.Size, size))
		}
		if lastSize > 0 && !about.Complete {
			must(tlog.CheckTree(hashes(line.Proof), size, root, lastSize, lastRoot))
		}
		lastSize, lastRoot = size, root
	}
	var leaves int64
	lines(filepath.Join(folder, "entries.jsonl"), func(raw []byte) {
		var line entryLine
		must(json.Unmarshal(raw, &line))
		if line.LeafIndex == nil {
			return
		}
		leaves++
		if about.Complete {
			added, err := tlog.StoredHashes(*line.LeafIndex, []byte(line.Entry), reader)
			must(err)
			stored = append(stored, added...)
			return
		}
		must(tlog.CheckRecord(hashes(line.Proof), lastSize, lastRoot, *line.LeafIndex, tlog.RecordHash([]byte(line.Entry))))
	})
	if about.Complete {
		for _, line := range heads {
			_, root := open(line.Note, known)
			rebuilt, err := tlog.TreeHash(line.Size, reader)
			must(err)
			if rebuilt != root {
				must(fmt.Errorf("the tree of %d leaves has another root", line.Size))
			}
		}
	}
	if len(os.Args) > 4 {
		verifyReceipt(os.Args[3], os.Args[4], known)
	}
	must(json.NewEncoder(os.Stdout).Encode(map[string]int64{"heads": int64(len(heads)), "leaves": leaves}))
}
